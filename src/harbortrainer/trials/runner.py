"""Runs one trial of Harbor's and says how it ended.

Invariant: whatever happens inside the trial is data, an `Outcome` of the returned record. Exceptions are only
`UserError` (the task or the environment cannot be), `asyncio.CancelledError` (after the sandbox is torn down)
and defects.
"""

import asyncio
import shutil
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import ValidationError

from harbortrainer.config.explain import explain
from harbortrainer.errors import UserError
from harbortrainer.harbor_side import client_of, prepare, raised_by_the_task
from harbortrainer.sandbox.environment_choice import chosen
from harbortrainer.trials import clean_end, hooks, secrets
from harbortrainer.trials.agent_model import told
from harbortrainer.trials.failure_message import why
from harbortrainer.trials.host_secrets import keep_out
from harbortrainer.trials.model_calls import watch
from harbortrainer.trials.outcome import Outcome
from harbortrainer.trials.record import Failure, TrialRecord
from harbortrainer.trials.trial_spec import TrialSpec
from harbortrainer.trials.verifier_output import verifier_output

if TYPE_CHECKING:
    from harbor.models.trial.config import TrialConfig
    from harbor.trial.trial import Trial


type Judge = Callable[[TrialRecord], TrialRecord]
"""Looks at a finished trial's record and says what it is worth, before the trial's folder is kept or removed."""


async def run_trial(
    spec: TrialSpec,
    *,
    on_event: hooks.OnEvent | None = None,
    stop: clean_end.Stop | None = None,
    judge: Judge | None = None,
    door: hooks.Door | None = None,
) -> TrialRecord:
    """Run one trial from the start of its sandbox to its teardown.

    Args:
        spec: What to run.
        on_event: Awaited with the name of each event, in order and inside the trial, which goes on afterwards.
            A multi-step trial repeats agent-start, agent-end and verification-start for each step.
        stop: Says why the interception endpoint stopped the rollout (`max_turns`, `context_length`, ...), None
            while it has not. An agent, ours or not, that fails after a stop ended cleanly and is graded.
        judge: Has the last word on the record.
        door: The way to the model of an agent that runs inside its sandbox; `spec.model` is its address.

    Raises:
        UserError: The task cannot be loaded, the agent cannot be made, or the environment type is unknown.
        asyncio.CancelledError: The caller cancelled; the sandbox is gone by then. Harbor passes over one that
            comes while it ends the sandbox: the record comes back then.
    """
    prepare()
    from harbortrainer.trials.harbor_config import trial_config

    spec = _placed(spec)
    config = trial_config(spec)
    record: TrialRecord | None = None
    try:
        record = await _run(spec, config, on_event, stop or _never, door)
        record = judge(record) if judge is not None else record
    finally:
        await _tidy(spec, config, record)
    return record


def _placed(spec: TrialSpec) -> TrialSpec:
    """The spec with the kind of sandbox that the task is played in."""
    try:
        choice = chosen(spec.task_dir, spec.environment_type, spec.environment_kwargs)
    except (OSError, ValueError) as error:
        raise _bad_task(spec, error) from error
    return spec.model_copy(update={"environment_type": choice.kind, "environment_kwargs": choice.kwargs})


def _bad_task(spec: TrialSpec, error: Exception) -> UserError:
    if isinstance(error, ValidationError):
        return explain(error, str(spec.task_dir / "task.toml"))
    return UserError(" ".join(str(error).split()), where=str(spec.task_dir), do="check the task's files")


async def _run(
    spec: TrialSpec,
    config: "TrialConfig",
    on_event: hooks.OnEvent | None,
    stop: clean_end.Stop,
    door: hooks.Door | None,
) -> TrialRecord:
    from harbortrainer.trials.agent_install import keep_what_is_there
    from harbortrainer.trials.harbor_config import writes_key
    from harbortrainer.trials.harbor_result import record

    try:
        trial = await _create(spec, config)
    except UserError:
        raise
    except Exception as error:  # noqa: BLE001 - whatever an environment raises when it is made
        return _never_started(spec, config, error)
    seen = hooks.add(trial, on_event, spec.leftovers, door)
    keep_out(trial.agent, trial.agent_environment, _told_values(config))
    clean_end.end_cleanly(trial.agent, stop)
    if "version" not in spec.agent_kwargs:
        keep_what_is_there(trial.agent, told(spec.agent).entry.program)
    client = client_of(trial.agent)
    calls = watch(client) if client is not None else None
    result = await trial.run()
    if seen.defect is not None:
        raise seen.defect
    finished = record(result, spec, stop=stop(), post_mortem=seen.post_mortem)
    finished.turn_tokens = getattr(trial.agent, "turn_tokens", None) or seen.turn_tokens
    finished.calls = calls
    for changes in seen.changes:
        finished.note_changes(changes)
    secret = spec.model.api_key.get_secret_value() if spec.model is not None and writes_key(spec) else ""
    folder = Path(spec.trials_dir) / config.trial_name
    finished.verifier_output = await asyncio.to_thread(verifier_output, folder, secret=secret)
    return finished


def _told_values(config: "TrialConfig") -> set[str]:
    """What the agent is told on purpose, as variables and as arguments."""
    return {*config.agent.env.values(), *(value for value in config.agent.kwargs.values() if isinstance(value, str))}


async def _create(spec: TrialSpec, config: "TrialConfig") -> "Trial":
    from harbor.trial.trial import Trial

    try:
        with secrets.lend(spec.model.api_key.get_secret_value() if spec.model else secrets.NO_KEY):
            return await Trial.create(config)
    except Exception as error:  # of any task's or agent's code: what the user can mend is told, the rest goes on up
        frames = traceback.extract_tb(error.__traceback__)
        if raised_by_the_task([frame.name for frame in frames]):
            raise _bad_task(spec, error) from error
        if any(frame.filename.endswith("harbor/agents/factory.py") for frame in frames):
            reason = " ".join(str(error).split())
            raise UserError(reason, where=f"agent {spec.agent}", do="check its name and its kwargs") from error
        raise


def _never_started(spec: TrialSpec, config: "TrialConfig", error: Exception) -> TrialRecord:
    return TrialRecord(
        outcome=Outcome.sandbox_error,
        task=spec.task_dir.name,
        task_key=spec.task_key,
        environment_type=spec.environment_type,
        trial_name=config.trial_name,
        trial_dir=str((spec.trials_dir / config.trial_name).absolute()),
        error=Failure(type=type(error).__name__, message=why(str(error))),
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
