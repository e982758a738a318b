"""Runs one Harbor trial and returns its record.

Invariant: whatever happens inside the trial is an `Outcome` of the record. The only exceptions are `UserError` (invalid
task, agent or environment), `asyncio.CancelledError` (after the sandbox was removed) and bugs.

`stop_gracefully` ends an agent without an error once the interception endpoint has stopped the rollout. Most agents
raise or retry when their calls are refused, and Harbor skips the verifier if an agent raises. But the state that the
agent left is the policy's result and must be graded.
"""

import asyncio
import contextlib
import shutil
import traceback
from collections.abc import Awaitable, Callable, Generator
from contextvars import ContextVar
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from harbortrainer.config.explain import explain
from harbortrainer.config.trusted_tasks import HARNESS_TABLE, trust_remedy
from harbortrainer.errors import UserError
from harbortrainer.harbor_compat import (
    break_cycles,
    forget_loggers,
    llm_client,
    on_new_environment,
    prepare,
    raised_reading_task,
    redact_long_values,
    secret_values,
)
from harbortrainer.runs.memory import EndedObjects
from harbortrainer.sandbox.environment_types import choose_environment
from harbortrainer.sandbox.task_requirements import TaskRequirements
from harbortrainer.trials import hooks, secrets
from harbortrainer.trials.harbor_result import summarize_failure
from harbortrainer.trials.http_proxies import bypass_proxies
from harbortrainer.trials.kept_trials import limit_kept
from harbortrainer.trials.model_calls import record_calls
from harbortrainer.trials.outcome import Outcome, outcome_of_stop
from harbortrainer.trials.provider_faults import guard_environment
from harbortrainer.trials.record import Failure, TrialRecord
from harbortrainer.trials.sandbox_starts import report_start
from harbortrainer.trials.secrets import keep_secrets_out
from harbortrainer.trials.trial_spec import TrialSpec, agent_model_settings
from harbortrainer.trials.verifier_output import verifier_output

if TYPE_CHECKING:
    from harbor.environments.base import BaseEnvironment
    from harbor.models.trial.config import TrialConfig
    from harbor.trial.trial import Trial


class AgentStalledError(RuntimeError):
    """A timeout inside the agent. Harbor would read it as the agent's own timeout, which trains."""


type Stop = Callable[[], str | None]

GRACE_S = 3.0
"""Seconds that an agent may continue after the stop."""

_POLL_S = 0.5


def stop_gracefully(agent: object, stop: Stop, *, grace_s: float = GRACE_S) -> None:
    """Wrap a Harbor agent's `run` and `resume` so that after a stop they return, even if the agent raises or hangs."""
    for name in ("run", "resume"):
        setattr(agent, name, _guarded(getattr(agent, name), stop, grace_s))


def _guarded(run: Callable[..., Awaitable[None]], stop: Stop, grace_s: float) -> Callable[..., Awaitable[None]]:
    async def guarded(*args: Any, **kwargs: Any) -> None:
        task = asyncio.ensure_future(run(*args, **kwargs))
        try:
            await _until_done_or_stopped(task, stop, grace_s)
        finally:
            await _cancel(task)
        error = task.exception() if not task.cancelled() else None
        if error is None or outcome_of_stop(stop()) is not None:
            return
        try:
            if isinstance(error, TimeoutError):
                raise AgentStalledError(str(error) or "an operation of the agent timed out") from error
            raise error
        finally:
            del task, error  # the error's stack trace has this frame, and the trial

    return guarded


async def _until_done_or_stopped(task: asyncio.Future[None], stop: Stop, grace_s: float) -> None:
    while not task.done() and outcome_of_stop(stop()) is None:
        await asyncio.wait({task}, timeout=_POLL_S)
    if not task.done():
        await asyncio.wait({task}, timeout=grace_s)


async def _cancel(task: asyncio.Future[None]) -> None:
    """Cancel the task and wait; the caller reads its exception."""
    while not task.done():
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.wait({task})


type OutcomeReview = Callable[[TrialRecord], TrialRecord]
"""Returns the final record of a finished trial, before the trial's folder is kept or removed."""


async def run_trial(
    spec: TrialSpec,
    *,
    on_event: hooks.OnEvent | None = None,
    stop: Stop | None = None,
    review: OutcomeReview | None = None,
    proxy: hooks.ModelProxyProtocol | None = None,
) -> TrialRecord:
    """Run one trial, from starting its sandbox to removing it.

    Args:
        spec: The trial.
        on_event: Awaited inside the trial with the name of each event, in order. A multi-step trial repeats
            agent-start, agent-end and verification-start for each step.
        stop: Returns why the interception endpoint stopped the rollout (`max_turns`, `context_length`, ...), or None
            if it has not. An agent that fails after a stop is graded as if it had ended by itself.
        review: Decides the final record.
        proxy: Model proxy of an agent that runs inside its sandbox; `spec.model` has its address.

    Raises:
        UserError: The task cannot be loaded, the agent cannot be made, or the environment type is unknown. The task
            accesses this machine and is not trusted.
        asyncio.CancelledError: The caller cancelled, and the sandbox was removed. Harbor ignores a cancellation while
            it removes the sandbox; the record is then returned.
    """
    prepare()
    on_new_environment(_watch_environment)
    bypass_proxies([spec.model.base_url] if spec.model is not None else [])
    from harbortrainer.trials.trial_spec import trial_config

    spec = _with_chosen_environment(spec)
    config = trial_config(spec)
    record: TrialRecord | None = None
    _ENVIRONMENTS.set([])
    try:
        record = await _run(spec, config, on_event, stop or (lambda: None), proxy)
        record = review(record) if review is not None else record
    finally:
        await _clean_up(spec, config, record)
    return record


_ENVIRONMENTS: ContextVar[list["BaseEnvironment"]] = ContextVar("environments")
"""The sandboxes of the current trial."""
_ENDED = EndedObjects()


def _watch_environment(environment: "BaseEnvironment") -> None:
    _ENVIRONMENTS.get([]).append(environment)
    guard_environment(environment)
    report_start(environment)


def _with_chosen_environment(spec: TrialSpec) -> TrialSpec:
    """Return the spec with `auto` replaced by the environment type chosen for the task; refuse an exposed one."""
    try:
        choice = choose_environment(spec.task_dir, spec.environment_type, spec.environment_kwargs)
        exposure = [] if spec.trusted else TaskRequirements(spec.task_dir).exposure(choice.kind)
    except UserError:
        raise
    except Exception as error:  # the task's files can be anything
        raise _bad_task(spec, error) from error
    if exposure:
        what = f"the task can access this machine: {'; '.join(exposure)}"
        raise UserError(what, where=str(spec.task_dir), do=trust_remedy([spec.task_dir.name], HARNESS_TABLE))
    return spec.model_copy(update={"environment_type": choice.kind, "environment_kwargs": choice.kwargs})


def _bad_task(spec: TrialSpec, error: Exception) -> UserError:
    if isinstance(error, ValidationError):
        return explain(error, str(spec.task_dir / "task.toml"))
    return UserError(
        " ".join(str(error).split())[:500] or type(error).__name__,
        where=str(spec.task_dir),
        do="check the task's files",
    )


async def _run(
    spec: TrialSpec,
    config: "TrialConfig",
    on_event: hooks.OnEvent | None,
    stop: Stop,
    proxy: hooks.ModelProxyProtocol | None,
) -> TrialRecord:
    from harbortrainer.trials.agent_install import reuse_installed_agent
    from harbortrainer.trials.harbor_result import record_from_result
    from harbortrainer.trials.trial_spec import writes_key

    try:
        trial = await _create(spec, config)
    except UserError:
        raise
    except Exception as error:  # noqa: BLE001 - any error of an environment's constructor
        return _never_started(spec, config, error)
    with _freed_at_end(trial):
        if trial.agent_environment.capabilities.mounted:
            # Harbor lets every user of this machine write here, also rewards.
            # A container's root can make setuid programs.
            trial.paths.trial_dir.chmod(0o700)
        redact_long_values(trial, secrets.MIN_REDACTED_CHARS)
        observed = hooks.add_hooks(trial, on_event, spec.leftovers, proxy)
        keep_secrets_out(trial.agent, trial.agent_environment, _intended_values(config))
        stop_gracefully(trial.agent, stop)
        if "version" not in spec.agent_kwargs:
            reuse_installed_agent(trial.agent, agent_model_settings(spec.agent).entry.program)
        client = llm_client(trial.agent)
        calls = record_calls(client) if client is not None else None
        try:
            result = await trial.run()
        except Exception as error:
            if raised_reading_task(error):
                raise _bad_task(spec, error) from error
            raise
        if observed.defect is not None:
            raise observed.defect
        record = record_from_result(result, spec, stop=stop(), post_mortem=observed.post_mortem)
        record.turn_tokens = getattr(trial.agent, "turn_tokens", None) or observed.turn_tokens
        record.calls = calls
        secret = spec.model.api_key.get_secret_value() if spec.model is not None and writes_key(spec) else ""
        redact = partial(secrets.redact_texts, hidden={secret, *secret_values(trial)})
        for changes in observed.changes:
            record.add_changes(changes, redact)
        folder = Path(spec.trials_dir) / config.trial_name
        steps = [step.name for step in record.steps]
        record.verifier_output = await asyncio.to_thread(verifier_output, folder, steps=steps, secret=secret)
        return record


@contextlib.contextmanager
def _freed_at_end(trial: "Trial") -> Generator[None]:
    """Break the reference cycles of a trial when the block ends."""
    environments = _ENVIRONMENTS.get()
    try:
        yield
    finally:
        break_cycles(trial, environments)
        for part in (trial.agent, *environments):  # a trial that is still in memory holds its agent
            _ENDED.add(part)
        environments.clear()  # the context outlives the trial


def _intended_values(config: "TrialConfig") -> set[str]:
    """Return the values that the config passes to the agent, as variables and as arguments."""
    return {*config.agent.env.values(), *(value for value in config.agent.kwargs.values() if isinstance(value, str))}


async def _create(spec: TrialSpec, config: "TrialConfig") -> "Trial":
    from harbor.trial.trial import Trial

    try:
        with secrets.provide_api_key(spec.model.api_key.get_secret_value() if spec.model else secrets.NO_KEY):
            return await Trial.create(config)
    except Exception as error:  # raised by any task's or agent's code; errors that the user can fix become `UserError`
        if raised_reading_task(error):
            raise _bad_task(spec, error) from error
        frames = traceback.extract_tb(error.__traceback__)
        if any(frame.filename.endswith("harbor/agents/factory.py") for frame in frames):
            reason = " ".join(str(error).split())
            raise UserError(
                reason, where=f"agent {spec.agent}", do="check the agent's name and agent_kwargs"
            ) from error
        raise


def _never_started(spec: TrialSpec, config: "TrialConfig", error: Exception) -> TrialRecord:
    return TrialRecord(
        outcome=Outcome.sandbox_error,
        task=spec.task_dir.name,
        task_key=spec.task_key,
        environment_type=spec.environment_type,
        trial_name=config.trial_name,
        trial_dir=str((spec.trials_dir / config.trial_name).absolute()),
        error=Failure(type=type(error).__name__, message=summarize_failure(str(error))),
    )


async def _clean_up(spec: TrialSpec, config: "TrialConfig", record: TrialRecord | None) -> None:
    """Remove the trial's folder, or only the secrets in it, depending on `keep_trials`, and the oldest kept folders."""
    from harbortrainer.trials.trial_spec import writes_key

    forget_loggers(config.trial_name)
    folder = Path(spec.trials_dir) / config.trial_name
    failed = record is not None and not record.outcome.trains
    if spec.keep_trials == "none" or (spec.keep_trials == "failed" and not failed):
        await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
        if record is not None:
            record.trial_dir = None
        return
    if spec.model is not None and writes_key(spec):
        await asyncio.to_thread(secrets.redact, folder, spec.model.api_key.get_secret_value())
    if spec.keep_trials == "failed" and spec.keep_trials_mb is not None:
        await limit_kept(folder, spec.keep_trials_mb * 1_000_000)
