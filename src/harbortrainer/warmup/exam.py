"""The exam at the end of a warm-up: the policy plays real trials, and the mean reward says where it stands.

Every trial is Harbor's own, with Terminus-2 in a real sandbox and the embedded sampler behind it, exactly what the
reinforcement learning that follows will see.
"""

import asyncio
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from harbortrainer.trials.record import TrialRecord
from harbortrainer.trials.runner import run_trial
from harbortrainer.trials.spec import ModelEndpoint, TrialSpec
from harbortrainer.warmup.family import Variant

CONCURRENCY = 8
MAX_TURNS = 3
MAX_LENGTH = 512


def examine(policy: Path, variants: Sequence[Variant], *, seed: int, environment_type: str) -> list[float]:
    """Rewards of one trial on each of `variants`; trials whose outcome does not train are left out.

    Tasks and trials are written below `policy` while the exam lasts: who cleans that folder up after a kill cleans up
    all.
    """
    with tempfile.TemporaryDirectory(prefix="exam-", dir=policy) as folder, ThreadPoolExecutor(1) as thread:
        # A thread of its own, since the caller may be inside an event loop.
        records = thread.submit(_run, policy, variants, Path(folder), seed, environment_type).result()
    return [record.reward for record in records if record.outcome.trains and record.reward is not None]


def _run(
    policy: Path, variants: Sequence[Variant], folder: Path, seed: int, environment_type: str
) -> list[TrialRecord]:
    from harbortrainer.engines.local.sampler import Sampler

    with Sampler(policy, seed=seed, max_model_len=MAX_LENGTH) as sampler:
        model = ModelEndpoint(name=str(policy), base_url=f"{sampler.url}/v1", context_limit=MAX_LENGTH)
        specs = [
            TrialSpec(
                task_dir=variant.write(folder / "tasks"),
                trials_dir=folder / "trials",
                model=model,
                max_turns=MAX_TURNS,
                environment_type=environment_type,
                keep_trials="none",
            )
            for variant in variants
        ]
        return asyncio.run(_all(specs))


async def _all(specs: Sequence[TrialSpec]) -> list[TrialRecord]:
    gate = asyncio.Semaphore(CONCURRENCY)

    async def one(spec: TrialSpec) -> TrialRecord:
        async with gate:
            return await run_trial(spec)

    return list(await asyncio.gather(*(one(spec) for spec in specs)))
