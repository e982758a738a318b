"""verifiers' own taskset and bash loop, in containers. Runs in an environment with verifiers 0.4.

    .venv-today/bin/python benchmarks/verifiers_rival.py URL TOKENIZER RENDERER

Starts an episode for each line on stdin, without a limit on their number. When an episode ends, prints its line and the
number of rows for a trainer. The task must be in verifiers' download cache, below HOME.
"""

import asyncio
import logging
import sys
from pathlib import Path

from scripted_model import renderer_config
from verifiers.v1.clients import ModelContext, TrainClientConfig
from verifiers.v1.utils.loaders import load_environment, resolve_env_config

from harbortrainer.environment.verifiers_compat import SamplingConfig

DATASET = "bench/tasks"
CACHED = Path(".cache") / "harbor" / DATASET.replace("/", "_")
"""Cache folder of the dataset, below HOME; the taskset downloads it only if this is missing."""


async def main(url: str, tokenizer: str, renderer: str) -> None:
    """Run episodes until stdin closes."""
    agent = {"harness": {"id": "bash", "edit": False}, "runtime": {"type": "docker"}}
    made = load_environment(resolve_env_config({"taskset": {"id": "harbor", "dataset": DATASET}, "agent": agent}))
    client = TrainClientConfig(base_url=url, renderer=renderer_config(renderer), renderer_model_name=tokenizer)
    context = ModelContext(client=client, model="scripted", sampling=SamplingConfig(temperature=1.0, max_tokens=512))
    (task,) = made.taskset

    async def play(name: str) -> None:
        (slot,) = made.slots(task, 1)
        (trace,) = (await made.run_slot(slot, context)).traces
        said = len(trace.branches) if trace.reward == 1.0 else f"reward {trace.reward}, {trace.errors}"
        print(name, str(said).replace("\n", " "), flush=True)

    async with made.serving(), asyncio.TaskGroup() as playing:
        while name := (await asyncio.to_thread(sys.stdin.readline)).strip():
            playing.create_task(play(name))


if __name__ == "__main__":
    logging.disable(logging.WARNING)
    asyncio.run(main(*sys.argv[1:4]))
