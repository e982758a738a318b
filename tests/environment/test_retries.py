"""Failed trials that verifiers retries."""

import pytest
from verifiers.v1.trace import Error
from verifiers.v1.utils import retries as verifiers_retries

from harbortrainer.environment.plugin_config import retry_config
from harbortrainer.environment.rollout_state import Attempts, TrialFailedError, TrialRetriedError, trace_error
from harbortrainer.trials.agent_install import AgentMissingError, AgentNotInstalledError
from harbortrainer.trials.outcome import Outcome
from harbortrainer.trials.record import Failure, TrialRecord


def record(outcome: Outcome) -> TrialRecord:
    return TrialRecord(
        outcome=outcome,
        task="a-task",
        reward=(0.0 if outcome is Outcome.self_inflicted else 0.5) if outcome.trains else None,
        evidence="inside: no shell. sound: the daemon answers" if outcome is Outcome.self_inflicted else "",
        error=None if outcome.trains else Failure(type="SomeError", message="it broke"),
    )


@pytest.mark.parametrize("outcome", [outcome for outcome in Outcome if outcome.trains])
def test_trainable_outcome_is_no_error(outcome: Outcome) -> None:
    assert trace_error(record(outcome), Attempts()) is None


@pytest.mark.parametrize("outcome", [outcome for outcome in Outcome if not outcome.trains])
def test_failure_is_retried_as_often_as_table_says(outcome: Outcome) -> None:
    attempts = Attempts()
    errors = [trace_error(record(outcome), attempts) for _ in range(outcome.retries + 1)]
    assert [type(error) for error in errors] == [TrialRetriedError] * outcome.retries + [TrialFailedError]
    assert all(str(error).startswith(f"{outcome}: SomeError: it broke") for error in errors)


def test_sandbox_retry_pause_doubles_and_verifier_retry_has_none() -> None:
    attempts, pauses = Attempts(), []
    for _ in range(3):
        trace_error(record(Outcome.sandbox_error), attempts)
        pauses.append(attempts.pause_s)
    assert pauses == [1.0, 2.0, 4.0]
    trace_error(record(Outcome.verifier_error), attempts)
    assert attempts.pause_s == 0.0


def test_retries_are_counted_per_outcome() -> None:
    attempts = Attempts()
    trace_error(record(Outcome.verifier_error), attempts)
    assert isinstance(trace_error(record(Outcome.sandbox_error), attempts), TrialRetriedError)


def test_uninstallable_agent_is_not_retried() -> None:
    errors = []
    for kind in (AgentNotInstalledError, AgentMissingError):
        failed = TrialRecord(
            outcome=Outcome.agent_error, task="a-task", error=Failure(type=kind.__name__, message="no such host")
        )
        errors.append(type(trace_error(failed, Attempts())))
    assert errors == [TrialRetriedError, TrialFailedError]


def test_trial_that_never_ended_is_cancelled_and_final() -> None:
    error = trace_error(None, Attempts())
    assert isinstance(error, TrialFailedError)
    assert str(error).startswith("cancelled:")


def _retried(*names: str) -> bool:
    errors = [Error(type=name, message="m") for name in names]
    if hasattr(verifiers_retries, "_retryable"):  # 0.3
        return any(verifiers_retries._retryable(error, retry_config()) for error in errors)
    return verifiers_retries.RetryState(retry_config()).next_error(errors) is not None


def test_verifiers_retries_only_retryable_errors() -> None:
    assert _retried("TrialRetriedError")
    assert _retried("ProviderError", "TrialRetriedError")
    assert not _retried("TrialFailedError")
    assert not _retried("HarnessError")
