"""A project folder as a user has it before a launch: a valid run file, model and task."""

from pathlib import Path

import numpy
from safetensors.numpy import save_file
from tiny_model import QWEN3_TOKENS, build_tiny_tokenizer

RUN_FILE = """
max_steps = 1
seq_len = 512
[run]
name = "r"
[model]
name = "model"
[trainer.model.lora]
[orchestrator]
batch_size = 4
group_size = 2
[orchestrator.concurrency]
max_inflight = 2
[orchestrator.renderer]
name = "qwen3"
thinking_retention = "all"
[[orchestrator.train.source]]
env = { taskset = { id = "harbor_env", tasks_dir = "tasks" }, agent = { harness = { environment_type = "local" } } }
"""


def write_project(folder: Path) -> Path:
    """Write the run file, the model and the task into an empty folder, and return that folder."""
    (folder / "run.toml").write_text(RUN_FILE)
    (folder / "tasks" / "one").mkdir(parents=True)
    (folder / "tasks" / "one" / "task.toml").write_text('version = "1.0"\n')
    (folder / "tasks" / "one" / "instruction.md").write_text("do it")
    (folder / "tasks" / "one" / "tests").mkdir()
    (folder / "tasks" / "one" / "tests" / "test.sh").write_text("echo 1 > /logs/verifier/reward.txt\n")
    (folder / "tasks" / "one" / "environment").mkdir()
    (folder / "tasks" / "one" / "environment" / "Dockerfile").write_text("FROM debian:12-slim\n")
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text('{"model_type": "qwen3"}')
    save_file({"weight": numpy.zeros(1, "float32")}, folder / "model" / "model.safetensors")
    tokenizer = build_tiny_tokenizer()
    tokenizer.add_tokens(QWEN3_TOKENS, special_tokens=True)
    tokenizer.save_pretrained(folder / "model")
    return folder
