"""A training run small enough for a test: a random model, two tasks with random rewards, real trials.

    python tests/e2e/mini_run.py CONFIG [--resume]

runs it in this process, as the command line does. A random model never solves a task. The verifier therefore returns a
random reward, which gives groups nonzero advantages; the tests check tokens, rewards and files, not learning.
"""

import os
import sys
from pathlib import Path

from tiny_model import build_tiny_model

FOLDER = Path(__file__).parent
ENVIRONMENT = os.environ | {"PYTHONPATH": f"{FOLDER.parent}:{FOLDER}", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
"""Variables of a process that runs this file or imports it."""

TASK = """version = "1.0"
[agent]
timeout_sec = 60.0
[verifier]
timeout_sec = 30.0
[environment]
allow_internet = false
memory_mb = 512
"""
COIN_FLIP = """#!/bin/sh
side=$(( $(od -An -N1 -tu1 /dev/urandom) % 2 ))
echo "{\\"reward\\": $side, \\"coin\\": $side}" > /logs/verifier/reward.json
"""

CONFIG = """
max_steps = {steps}
seq_len = 6144
seed = 1
output_dir = "{folder}/outputs"

[run]
name = "mini"

[model]
name = "{folder}/model"

[prices]
prompt = 1.0
hour = 2.0

[trainer.model.lora]
rank = 4
[trainer.optim]
lr = 1e-3

[orchestrator]
batch_size = 8
group_size = 4
max_off_policy_steps = 1
[orchestrator.renderer]
name = "default"
[orchestrator.concurrency]
max_inflight = 8
[orchestrator.train.sampling]
max_completion_tokens = 8

[[orchestrator.train.source]]
env = {{ {env} }}
curriculum = {{ sampler = {{ type = "difficulty_pool" }}, gates = {{ signal = {{ }} }} }}
serve = {{ pool = {{ type = "static", num_workers = 1 }} }}
"""
EVALUATIONS = """
[orchestrator.eval]
interval = 1
[orchestrator.eval.sampling]
max_completion_tokens = 8
[[orchestrator.eval.source]]
name = "held-out"
env = {{ {env} }}
serve = {{ pool = {{ type = "static", num_workers = 1 }} }}
"""
ENV = (
    'taskset = {{ id = "harbor_env", tasks_dir = "{folder}/tasks", may_overlap = true }}, agent = {{ max_turns = 2, '
    'harness = {{ id = "harbor_env", environment_type = "{environment}", keep_trials = "{keep}" }} }}'
)


def write_task(folder: Path, name: str) -> None:
    """Write one task whose verifier returns a random reward of 0 or 1."""
    task = folder / name
    for subfolder in ("environment", "tests"):
        (task / subfolder).mkdir(parents=True)
    (task / "task.toml").write_text(TASK)
    (task / "instruction.md").write_text(f"Look around ({name}).\n")
    (task / "environment" / "Dockerfile").write_text("FROM debian:12-slim\nWORKDIR /app\n")
    script = task / "tests" / "test.sh"
    script.write_text(COIN_FLIP)
    script.chmod(0o755)


def write_run(
    folder: Path,
    *,
    steps: int = 2,
    environment: str = "local",
    keep: str = "none",
    evaluates: bool = True,
    tail: str = "",
) -> Path:
    """Write the model, tasks and config of a mini run; return the config's path."""
    build_tiny_model(folder / "model", max_position_embeddings=8192)
    for name in ("heads", "tails"):
        write_task(folder / "tasks", name)
    env = ENV.format(folder=folder, environment=environment, keep=keep)
    config = folder / "mini.toml"
    text = CONFIG + EVALUATIONS * evaluates
    config.write_text(text.format(folder=folder, steps=steps, env=env) + tail)
    return config


def main(arguments: list[str]) -> int:
    """Train with the config and options of the command line."""
    from harbortrainer.cli import main as command_line

    return command_line(["train", "--engine", "local", "--config", *arguments])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
