"""The arms that `benchmarks/trials.py` compares, with the same task, model server and sandbox."""

import asyncio
import shutil
import tempfile
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from harbortrainer.sandbox.environment_types import environment_config
from harbortrainer.trials.runner import run_trial
from harbortrainer.trials.trial_spec import ModelEndpoint, TrialSpec

MODEL = "scripted"
_LIMIT = 1_000_000


@dataclass(frozen=True)
class Setting:
    """Task, model server and sandbox of a trial."""

    task: Path
    url: str
    environment: str
    image: str = "host"
    """Root filesystem of a local sandbox."""
    verifier_tools: str = "agent"
    """System folders that the verifier sees in a local sandbox."""

    @property
    def kwargs(self) -> dict[str, object]:
        """Keyword arguments of the environment."""
        local = {"image": self.image, "verifier_tools": self.verifier_tools}
        return dict(local) if self.environment == "local" else {}


@asynccontextmanager
async def _folder() -> AsyncGenerator[Path]:
    """Yield a folder for one trial. A thread removes it, so that the disk does not block the event loop."""
    folder = await asyncio.to_thread(lambda: tempfile.mkdtemp(prefix="bench-"))
    try:
        yield Path(folder)
    finally:
        await asyncio.to_thread(shutil.rmtree, folder)


type Arm = Callable[[Setting], Awaitable[int]]
"""Runs one trial to its end, and returns its number of rows for a trainer."""


async def ours(setting: Setting) -> int:
    """Run `TrainableTerminus2` through `run_trial`, as an episode does; the model's endpoint keeps the tokens."""
    async with _folder() as folder:
        record = await run_trial(
            TrialSpec(
                task_dir=setting.task,
                trials_dir=folder,
                model=ModelEndpoint(name=MODEL, base_url=setting.url, context_limit=_LIMIT),
                agent_kwargs={"collect_rollout_details": False},
                environment_type=setting.environment,
                environment_kwargs=setting.kwargs,
            )
        )
    if record.reward != 1.0:
        raise RuntimeError(f"a trial of our arm failed: {record.outcome} {str(record.error)[:500]}")
    return 0


async def ours_with_image_tools(setting: Setting) -> int:
    """Run `ours` with `verifier_tools = "image"`."""
    return await ours(replace(setting, verifier_tools="image"))


async def stock(setting: Setting) -> int:
    """Run Harbor's `terminus-2` through Harbor's own `Trial`, without token ids."""
    return await _stock(setting, details=False)


async def stock_with_tokens(setting: Setting) -> int:
    """Run `stock` with `collect_rollout_details`, which a trainer needs; it gives one row per turn."""
    return await _stock(setting, details=True)


def _stock_environment(setting: Setting) -> dict[str, Any]:
    """Return Harbor's Docker environment; Harbor has no local sandbox, so both sides use ours."""
    if setting.environment == "docker":
        return {"type": "docker"}
    return dict(environment_config(setting.environment, setting.kwargs))


async def _stock(setting: Setting, *, details: bool) -> int:
    from harbor.models.trial.config import AgentConfig, EnvironmentConfig, TaskConfig, TrialConfig
    from harbor.trial.trial import Trial

    kwargs = {
        "api_base": setting.url,
        "collect_rollout_details": details,
        "record_terminal_session": False,  # saves 1.5 s of setup, as our side does
        "model_info": {
            "max_input_tokens": _LIMIT,
            "max_output_tokens": _LIMIT,
            "input_cost_per_token": 0.0,
            "output_cost_per_token": 0.0,
        },
    }
    async with _folder() as folder:
        config = TrialConfig(
            task=TaskConfig(path=setting.task),
            trials_dir=folder,
            agent=AgentConfig(name="terminus-2", model_name=f"hosted_vllm/{MODEL}", kwargs=kwargs),
            environment=EnvironmentConfig(**_stock_environment(setting)),
        )
        trial = await Trial.create(config)
        result = await trial.run()
    if result.verifier_result is None or result.verifier_result.rewards != {"reward": 1.0}:
        raise RuntimeError(f"a stock trial failed: {str(result.exception_info)[:500]}")
    details_of = (result.agent_result.rollout_details if result.agent_result else None) or []
    return sum(len(detail.get("prompt_token_ids", [])) for detail in details_of)


ARMS: dict[str, Arm] = {
    "ours": ours,
    "ours, image tools": ours_with_image_tools,
    "stock": stock,
    "stock + tokens": stock_with_tokens,
}
