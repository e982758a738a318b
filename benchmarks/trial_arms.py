"""The two sides that `benchmarks/trials.py` compares, on the same task, the same model server and the same sandbox."""

import asyncio
import shutil
import tempfile
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harbortrainer.sandbox.names import environment_config
from harbortrainer.trials.runner import run_trial
from harbortrainer.trials.spec import ModelEndpoint, TrialSpec

MODEL = "scripted"
_LIMIT = 1_000_000


@dataclass(frozen=True)
class Setting:
    """What a trial runs on."""

    task: Path
    url: str
    environment: str


@asynccontextmanager
async def _folder() -> AsyncGenerator[Path]:
    """A folder for one trial, removed in a thread: what a disk takes to forget is not the trial's."""
    folder = await asyncio.to_thread(lambda: tempfile.mkdtemp(prefix="bench-"))
    try:
        yield Path(folder)
    finally:
        await asyncio.to_thread(shutil.rmtree, folder)


type Arm = Callable[[Setting], Awaitable[None]]


async def ours(setting: Setting) -> None:
    """`TrainableTerminus2` through `run_trial`, as an episode runs it: the endpoint keeps the tokens."""
    async with _folder() as folder:
        record = await run_trial(
            TrialSpec(
                task_dir=setting.task,
                trials_dir=folder,
                model=ModelEndpoint(name=MODEL, base_url=setting.url, context_limit=_LIMIT),
                agent_kwargs={"collect_rollout_details": False},
                environment_type=setting.environment,
            )
        )
    if record.reward != 1.0:
        raise RuntimeError(f"a trial of ours went wrong: {record.outcome} {str(record.error)[:500]}")


async def stock(setting: Setting) -> None:
    """Harbor's `terminus-2` through Harbor's own `Trial`, without token ids."""
    await _stock(setting, details=False)


async def stock_with_tokens(setting: Setting) -> None:
    """The same with `collect_rollout_details`, without which a trainer has nothing to train on."""
    await _stock(setting, details=True)


def _stock_environment(environment: str) -> dict[str, Any]:
    """Docker as Harbor has it; there is no stock counterpart of the local sandbox, so both sides share ours."""
    return {"type": "docker"} if environment == "docker" else environment_config(environment)


async def _stock(setting: Setting, *, details: bool) -> None:
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
            environment=EnvironmentConfig(**_stock_environment(setting.environment)),
        )
        trial = await Trial.create(config)
        result = await trial.run()
    if result.verifier_result is None or result.verifier_result.rewards != {"reward": 1.0}:
        raise RuntimeError(f"a stock trial went wrong: {str(result.exception_info)[:500]}")


ARMS: dict[str, Arm] = {"ours": ours, "stock": stock, "stock + tokens": stock_with_tokens}
