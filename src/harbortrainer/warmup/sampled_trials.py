"""Rewards of a policy in real trials during a warm-up.

Each trial is Harbor's own, in a real sandbox, with the embedded sampler, as in the reinforcement learning that follows.
"""

import asyncio
import tempfile
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from pydantic import SecretStr

from harbortrainer.config.run_sections import WarmupConfig
from harbortrainer.config.trusted_tasks import is_trusted
from harbortrainer.errors import UserError
from harbortrainer.trials.record import TrialRecord
from harbortrainer.trials.runner import run_trial
from harbortrainer.trials.trial_spec import ModelEndpoint, TrialSpec

_CONCURRENCY = 8


def measure_rewards(
    policy: Path,
    make_tasks: Callable[[Path], Sequence[Path]],
    config: WarmupConfig,
    *,
    seed: int,
    max_turns: int | None,
    max_length: int,
    answer_length: int | None = None,
    temperature: float = 1.0,
    timeout_multiplier: float = 1.0,
    trusted: Collection[Path] | None = None,
) -> list[float]:
    """Play one trial on each task and return the rewards of the graded ones.

    Trials are written below `policy`, so that a cleanup of that folder after a kill removes them too.

    Args:
        policy: Folder of the model.
        make_tasks: Returns the tasks' folders, given a temporary folder.
        config: The warm-up's table.
        seed: Seed of the sampler.
        max_turns: Most turns of a trial; None for no limit.
        max_length: Most tokens of a trial.
        answer_length: Most tokens of an answer.
        temperature: Sampling temperature.
        timeout_multiplier: Factor on the tasks' time limits.
        trusted: Tasks' folders that may access this machine; by default those with a folder name that `config` trusts.

    Raises:
        UserError: Fewer than half of the trials were graded.
    """
    limit = {"max_tokens": answer_length} if answer_length else {}
    with tempfile.TemporaryDirectory(prefix="trials-", dir=policy) as name, ThreadPoolExecutor(1) as thread:
        folder = Path(name)
        specs = [
            TrialSpec(
                task_dir=task,
                trials_dir=folder / "trials",
                agent=config.agent,
                agent_kwargs={"temperature": temperature, "llm_kwargs": limit},
                max_turns=max_turns,
                timeout_multiplier=timeout_multiplier,
                environment_type=config.environment_type,
                environment_kwargs=dict(config.environment_kwargs),
                trusted=is_trusted(task.name, config.trusted_tasks) if trusted is None else task in trusted,
                keep_trials="none",
            )
            for task in make_tasks(folder / "tasks")
        ]
        # The caller may be inside an event loop.
        records = thread.submit(_run, policy, specs, seed, max_length).result()
    graded = [record.reward for record in records if record.outcome.trains and record.reward is not None]
    if 2 * len(graded) < len(records):
        failed = next(record for record in records if not record.outcome.trains)
        raise UserError(
            f"only {len(graded)} of {len(records)} trials of the warm-up were graded "
            f"({failed.outcome}: {failed.error and failed.error.message})",
            where="warmup.environment_type",
            do="run `harbortrainer doctor`",
        )
    return graded


def _run(policy: Path, specs: Sequence[TrialSpec], seed: int, max_length: int) -> list[TrialRecord]:
    from harbortrainer.engines.local.sampler import Sampler

    with Sampler(policy, seed=seed, max_model_len=max_length) as sampler:
        for spec in specs:
            spec.model = ModelEndpoint(
                name=str(policy),
                base_url=f"{sampler.url}/v1",
                api_key=SecretStr(sampler.api_key),
                context_limit=max_length,
            )
        return asyncio.run(_run_all(specs))


async def _run_all(specs: Sequence[TrialSpec]) -> list[TrialRecord]:
    slots = asyncio.Semaphore(_CONCURRENCY)

    async def one(spec: TrialSpec) -> TrialRecord:
        async with slots:
            return await run_trial(spec)

    return list(await asyncio.gather(*(one(spec) for spec in specs)))
