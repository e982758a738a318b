"""The two sides that `benchmarks/trials.py` compares, on the same task, the same model server and the same sandbox."""

import asyncio
import shutil
import tempfile
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harbortrainer.sandbox.environment_types import environment_config
from harbortrainer.trials.runner import run_trial
from harbortrainer.trials.trial_spec import ModelEndpoint, TrialSpec

MODEL = "scripted"
_LIMIT = 1_000_000


@dataclass(frozen=True)
class Setting:
    """What a trial runs on."""

    task: Path
    url: str
    environment: str
    image: str = "host"
    """The root of a local sandbox."""

    @property
    def kwargs(self) -> dict[str, object]:
        """What the environment is made with."""
        return {"image": self.image} if self.environment == "local" else {}


@asynccontextmanager
async def _folder() -> AsyncGenerator[Path]:
    """A folder for one trial, removed in a thread: what a disk takes to forget is not the trial's."""
    folder = await asyncio.to_thread(lambda: tempfile.mkdtemp(prefix="bench-"))
    try:
        yield Path(folder)
    finally:
        await asyncio.to_thread(shutil.rmtree, folder)


type Arm = Callable[[Setting], Awaitable[int]]
"""Runs one trial to its end; how many rows a trainer gets of it."""


async def ours(setting: Setting) -> int:
    """`TrainableTerminus2` through `run_trial`, as an episode runs it: the endpoint keeps the tokens."""
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
        raise RuntimeError(f"a trial of ours went wrong: {record.outcome} {str(record.error)[:500]}")
    return 0


async def stock(setting: Setting) -> int:
    """Harbor's `terminus-2` through Harbor's own `Trial`, without token ids."""
    return await _stock(setting, details=False)


async def stock_with_tokens(setting: Setting) -> int:
    """The same with `collect_rollout_details`, without which a trainer has nothing to train on: a row for each turn."""
    return await _stock(setting, details=True)


def _stock_environment(setting: Setting) -> dict[str, Any]:
    """Docker as Harbor has it; there is no stock counterpart of the local sandbox, so both sides share ours."""
    if setting.environment == "docker":
        return {"type": "docker"}
    return dict(environment_config(setting.environment, setting.kwargs))


async def _stock(setting: Setting, *, details: bool) -> int:
    from harbor.models.trial.config import AgentConfig, EnvironmentConfig, TaskConfig, TrialConfig
    from harbor.trial.trial import Trial

    kwargs = {
        "api_base": setting.url,
        "collect_rollout_details": details,
        "record_terminal_session": False,  # 1.5 s of set-up that ours does without too
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
        raise RuntimeError(f"a stock trial went wrong: {str(result.exception_info)[:500]}")
    details_of = (result.agent_result.rollout_details if result.agent_result else None) or []
    return sum(len(detail.get("prompt_token_ids", [])) for detail in details_of)


ARMS: dict[str, Arm] = {"ours": ours, "stock": stock, "stock + tokens": stock_with_tokens}
