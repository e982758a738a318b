"""Measure a policy's rewards in real trials, at the end of a warm-up.

Each trial is Harbor's own: Terminus-2 in a real sandbox, with the embedded sampler, as in the reinforcement learning
that follows.
"""

import asyncio
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from pydantic import SecretStr

from harbortrainer.trials.record import TrialRecord
from harbortrainer.trials.runner import run_trial
from harbortrainer.trials.trial_spec import ModelEndpoint, TrialSpec
from tiny_policy.variants import Variant

CONCURRENCY = 8
MAX_TURNS = 3
MAX_LENGTH = 512


def measure_rewards(
    policy: Path,
    variants: Sequence[Variant],
    *,
    seed: int,
    environment_type: str,
    environment_kwargs: Mapping[str, object],
) -> tuple[list[float], str]:
    """Play one trial on each variant.

    Tasks and trials are written below `policy`, so that a cleanup of that folder after a kill removes them too.

    Returns:
        The rewards of the graded trials, and the cause of the first failure; "" if there was none.
    """
    with tempfile.TemporaryDirectory(prefix="trials-", dir=policy) as folder, ThreadPoolExecutor(1) as thread:
        # The caller may be inside an event loop.
        settings = environment_type, dict(environment_kwargs)
        records = thread.submit(_run, policy, variants, Path(folder), seed, *settings).result()
    graded = [record.reward for record in records if record.outcome.trains and record.reward is not None]
    failed = [record for record in records if not record.outcome.trains]
    return graded, next((f"{record.outcome}: {record.error and record.error.message}" for record in failed), "")


def _run(
    policy: Path,
    variants: Sequence[Variant],
    folder: Path,
    seed: int,
    environment_type: str,
    environment_kwargs: dict[str, object],
) -> list[TrialRecord]:
    from harbortrainer.engines.local.sampler import Sampler

    with Sampler(policy, seed=seed, max_model_len=MAX_LENGTH) as sampler:
        model = ModelEndpoint(
            name=str(policy), base_url=f"{sampler.url}/v1", api_key=SecretStr(sampler.api_key), context_limit=MAX_LENGTH
        )
        specs = [
            TrialSpec(
                task_dir=variant.write(folder / "tasks"),
                trials_dir=folder / "trials",
                model=model,
                max_turns=MAX_TURNS,
                environment_type=environment_type,
                environment_kwargs=environment_kwargs,
                keep_trials="none",
            )
            for variant in variants
        ]
        return asyncio.run(_run_all(specs))


async def _run_all(specs: Sequence[TrialSpec]) -> list[TrialRecord]:
    slots = asyncio.Semaphore(CONCURRENCY)

    async def one(spec: TrialSpec) -> TrialRecord:
        async with slots:
            return await run_trial(spec)

    return list(await asyncio.gather(*(one(spec) for spec in specs)))
