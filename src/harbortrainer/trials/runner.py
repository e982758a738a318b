"""Runs one trial of Harbor's and says how it ended.

Invariant: whatever happens inside the trial is data, an `Outcome` of the returned record. Exceptions are only
`UserError` (the task or the environment cannot be), `asyncio.CancelledError` (after the sandbox is torn down)
and defects.
"""

import asyncio
import shutil
import tomllib
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from harbortrainer.errors import UserError
from harbortrainer.trials import grading, secrets
from harbortrainer.trials.outcome import Outcome, ending_of
from harbortrainer.trials.record import Failure, TrialRecord
from harbortrainer.trials.spec import TrialSpec

if TYPE_CHECKING:
    from harbor.models.trial.config import TrialConfig
    from harbor.trial.hooks import TrialHookEvent
    from harbor.trial.trial import Trial

type Event = str
"""start, environment-start, agent-start, agent-end, verification-start, end, cancel: Harbor's own names."""

type OnEvent = Callable[[Event], Awaitable[None]]

type Stop = Callable[[], str | None]


async def run_trial(spec: TrialSpec, *, on_event: OnEvent | None = None, stop: Stop | None = None) -> TrialRecord:
    """Run one trial from the start of its sandbox to its teardown.

    Args:
        spec: What to run.
        on_event: Awaited at each event, in order and inside the trial: what it does happens before the trial
            goes on. A multi-step trial repeats agent-start, agent-end and verification-start for each step.
        stop: Says why the interception endpoint stopped the rollout (`max_turns`, `context_length`, ...), None
            while it has not. An agent, ours or not, that fails after a stop ended cleanly and is graded.

    Raises:
        UserError: The task cannot be loaded, or the environment type is unknown.
        asyncio.CancelledError: The caller cancelled; the sandbox is gone by then.
    """
    from harbortrainer.trials.harbor_config import trial_config

    config = trial_config(spec)
    record: TrialRecord | None = None
    try:
        record = await _run(spec, config, on_event, stop or _never)
    finally:
        await _tidy(spec, config, record)
    return record


async def _run(spec: TrialSpec, config: "TrialConfig", on_event: OnEvent | None, stop: Stop) -> TrialRecord:
    from harbortrainer.trials.harbor_result import record

    try:
        trial = await _create(spec, config)
    except UserError:
        raise
    except Exception as error:  # noqa: BLE001 - whatever an environment raises when it is made
        return _never_started(spec, config, error)
    _add_hooks(trial, on_event)
    for name in ("run", "resume"):
        setattr(trial.agent, name, _ends_cleanly(getattr(trial.agent, name), stop))
    finished = record(await trial.run(), spec, stop=stop())
    finished.turn_tokens = getattr(trial.agent, "turn_tokens", [])
    return finished


async def _create(spec: TrialSpec, config: "TrialConfig") -> "Trial":
    from harbor.trial.trial import Trial

    try:
        with secrets.lend(spec.model.api_key.get_secret_value() if spec.model else secrets.NO_KEY):
            return await Trial.create(config)
    except (FileNotFoundError, NotADirectoryError, tomllib.TOMLDecodeError, ValidationError) as error:
        reason = " ".join(str(error).split())
        raise UserError(reason, where=str(spec.task_dir), do="check the task's files") from error


def _never_started(spec: TrialSpec, config: "TrialConfig", error: Exception) -> TrialRecord:
    return TrialRecord(
        outcome=Outcome.sandbox_error,
        task=spec.task_dir.name,
        task_key=spec.task_key,
        trial_name=config.trial_name,
        trial_dir=str((spec.trials_dir / config.trial_name).absolute()),
        error=Failure(type=type(error).__name__, message=str(error)[:2000]),
    )


def _add_hooks(trial: "Trial", on_event: OnEvent | None) -> None:
    from harbor.trial.hooks import TrialEvent

    async def tell(event: "TrialHookEvent") -> None:
        if on_event is not None:
            await on_event(event.event.value)

    async def clear(event: "TrialHookEvent") -> None:
        del event
        await grading.clear(trial.agent_environment, trial.paths.verifier_dir, inside=_graded_inside(trial))

    for event in TrialEvent:
        trial.add_hook(event, tell)
    trial.add_hook(TrialEvent.VERIFICATION_START, clear)


def _graded_inside(trial: "Trial") -> bool:
    """Whether the step that is being graded now is graded in the agent's sandbox."""
    from harbor.models.task.config import VerifierEnvironmentMode
    from harbor.models.task.verifier_mode import resolve_step_verifier_mode, resolve_task_verifier_mode

    task = trial.task.config
    if not task.steps:
        return resolve_task_verifier_mode(task) is VerifierEnvironmentMode.SHARED
    step = task.steps[len(trial.result.step_results or []) - 1]
    return resolve_step_verifier_mode(task, step) is VerifierEnvironmentMode.SHARED


def _ends_cleanly(run: Callable[..., Awaitable[None]], stop: Stop) -> Callable[..., Awaitable[None]]:
    """`run`, except that a failure after the endpoint stopped the rollout is an end, so that Harbor grades."""

    async def guarded(*args: Any, **kwargs: Any) -> None:
        try:
            await run(*args, **kwargs)
        except Exception:
            if ending_of(stop()) is None:
                raise

    return guarded


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
