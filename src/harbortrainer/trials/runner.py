"""Runs one trial of Harbor's and says how it ended.

Invariant: whatever happens inside the trial is data, an `Outcome` of the returned record. Exceptions are only
`UserError` (the task or the environment cannot be), `asyncio.CancelledError` (after the sandbox is torn down)
and defects.
"""

import asyncio
import os
import shutil
import traceback
from pathlib import Path
from typing import TYPE_CHECKING

from harbortrainer.errors import UserError
from harbortrainer.trials import guard, hooks, secrets
from harbortrainer.trials.outcome import Outcome
from harbortrainer.trials.record import Failure, TrialRecord
from harbortrainer.trials.spec import TrialSpec

if TYPE_CHECKING:
    from harbor.models.trial.config import TrialConfig
    from harbor.trial.trial import Trial


async def run_trial(
    spec: TrialSpec, *, on_event: hooks.OnEvent | None = None, stop: guard.Stop | None = None
) -> TrialRecord:
    """Run one trial from the start of its sandbox to its teardown.

    Args:
        spec: What to run.
        on_event: Awaited with the name of each event, in order and inside the trial, which goes on afterwards.
            A multi-step trial repeats agent-start, agent-end and verification-start for each step.
        stop: Says why the interception endpoint stopped the rollout (`max_turns`, `context_length`, ...), None
            while it has not. An agent, ours or not, that fails after a stop ended cleanly and is graded.

    Raises:
        UserError: The task cannot be loaded, the agent cannot be made, or the environment type is unknown.
        asyncio.CancelledError: The caller cancelled; the sandbox is gone by then.
    """
    # Harbor imports LiteLLM, which asks the network for prices unless it is told not to.
    os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    from harbortrainer.trials.harbor_config import trial_config

    config = trial_config(spec)
    record: TrialRecord | None = None
    try:
        record = await _run(spec, config, on_event, stop or _never)
    finally:
        await _tidy(spec, config, record)
    return record


async def _run(spec: TrialSpec, config: "TrialConfig", on_event: hooks.OnEvent | None, stop: guard.Stop) -> TrialRecord:
    from harbortrainer.trials.harbor_result import record

    try:
        trial = await _create(spec, config)
    except UserError:
        raise
    except Exception as error:  # noqa: BLE001 - whatever an environment raises when it is made
        return _never_started(spec, config, error)
    seen = hooks.add(trial, on_event)
    guard.end_cleanly(trial.agent, stop)
    result = await trial.run()
    if seen.defect is not None:
        raise seen.defect
    finished = record(result, spec, stop=stop())
    finished.turn_tokens = getattr(trial.agent, "turn_tokens", None) or seen.turn_tokens
    return finished


async def _create(spec: TrialSpec, config: "TrialConfig") -> "Trial":
    from harbor.trial.trial import Trial

    try:
        with secrets.lend(spec.model.api_key.get_secret_value() if spec.model else secrets.NO_KEY):
            return await Trial.create(config)
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        reason = " ".join(str(error).split())
        if any(frame.name == "_load_task" for frame in frames):
            raise UserError(reason, where=str(spec.task_dir), do="check the task's files") from error
        if any(frame.filename.endswith("harbor/agents/factory.py") for frame in frames):
            raise UserError(reason, where=f"agent {spec.agent}", do="check its name and its kwargs") from error
        raise


def _never_started(spec: TrialSpec, config: "TrialConfig", error: Exception) -> TrialRecord:
    return TrialRecord(
        outcome=Outcome.sandbox_error,
        task=spec.task_dir.name,
        task_key=spec.task_key,
        trial_name=config.trial_name,
        trial_dir=str((spec.trials_dir / config.trial_name).absolute()),
        error=Failure(type=type(error).__name__, message=str(error)[:2000]),
    )


def _never() -> str | None:
    return None


async def _tidy(spec: TrialSpec, config: "TrialConfig", record: TrialRecord | None) -> None:
    """Remove secrets from the trial's folder, or the folder, as `keep_trials` says."""
    from harbortrainer.trials.harbor_config import writes_key

    folder = Path(spec.trials_dir) / config.trial_name
    failed = record is not None and not record.outcome.trains
    if spec.keep_trials == "none" or (spec.keep_trials == "failed" and not failed):
        await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
        if record is not None:
            record.trial_dir = None
    elif spec.model is not None and writes_key(spec):
        await asyncio.to_thread(secrets.redact, folder, spec.model.api_key.get_secret_value())
