"""The arms that `benchmarks/episodes.py` compares: whole episodes with tokens, as a trainer runs them.

An arm is opened once, like a worker of a trainer. Each call then runs one episode.
"""

from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from uuid import uuid4

from rival_arm import rival
from scripted_model import renderer_config
from trial_arms import Arm, Setting, stock_with_tokens


@dataclass(frozen=True)
class Stack:
    """The setting of an episode (task and model), with tokenizer, renderer and trials folder."""

    setting: Setting
    tokenizer: Path
    renderer: str
    trials: Path


def _config(stack: Stack, environment: str, image: str) -> dict[str, Any]:
    harness: dict[str, Any] = {
        "environment_type": environment,
        "environment_kwargs": replace(stack.setting, environment=environment, image=image).kwargs,
        "trials_dir": str(stack.trials),
        "keep_trials": "none",
    }
    taskset = {"id": "harbor_env", "tasks_dir": str(stack.setting.task.parent)}
    return {"taskset": taskset, "agent": {"harness": harness, "retries": {"max_retries": 0}}}


@asynccontextmanager
async def _ours(stack: Stack, environment: str, image: str) -> AsyncGenerator[Arm]:
    """Run our plugin through verifiers, in this process, with a train client (exact tokens)."""
    from verifiers.v1.clients import ModelContext, TrainClientConfig
    from verifiers.v1.utils.loaders import load_environment, resolve_env_config

    from harbortrainer.environment.verifiers_compat import SamplingConfig

    made = load_environment(resolve_env_config(_config(stack, environment, image)))
    client = TrainClientConfig(
        base_url=stack.setting.url,
        renderer=renderer_config(stack.renderer),
        renderer_model_name=str(stack.tokenizer),
    )
    context = ModelContext(client=client, model="scripted", sampling=SamplingConfig(temperature=1.0, max_tokens=512))
    (task,) = made.taskset

    async def one(setting: Setting) -> int:
        del setting
        (slot,) = made.slots(task, 1)
        episode = await made.run_slot(slot, context)
        (trace,) = episode.traces
        if trace.reward != 1.0:
            raise RuntimeError(f"an episode of our arm failed: {trace.errors} {str(trace.info)[:1500]}")
        return len(trace.branches)

    async with made.serving():
        yield one


@asynccontextmanager
async def _stock(stack: Stack, environment: str, image: str) -> AsyncGenerator[Arm]:
    """Run Harbor's own `Trial` with the token lists that it collects; a trainer still has to join the turns."""
    setting = replace(stack.setting, environment=environment, image=image)

    async def one(_: Setting) -> int:
        return await stock_with_tokens(setting)

    yield one


type Opened = Callable[[Stack], AbstractAsyncContextManager[Arm]]

EPISODES: dict[str, Opened] = {
    "ours, local, host's root": lambda stack: _ours(stack, "local", "host"),
    "ours, local, image": lambda stack: _ours(stack, "local", "build"),
    "ours, docker": lambda stack: _ours(stack, "docker", ""),
    "verifiers' own, docker": lambda stack: rival(
        stack.setting, stack.tokenizer, stack.renderer, stack.trials.parent / f"rival-{uuid4().hex}"
    ),
    "stock Harbor, docker": lambda stack: _stock(stack, "docker", ""),
}
RIVAL = "stock Harbor, docker"
