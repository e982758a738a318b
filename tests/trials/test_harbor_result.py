"""Messages read from Harbor's trial result."""

from datetime import datetime

import pytest
from harbor.models.trial.result import ExceptionInfo, StepResult
from harbor.models.verifier.result import VerifierResult

from harbortrainer.trials.harbor_result import _message, _step, _stop_in
from harbortrainer.trials.outcome import Outcome, RewardRule


def fail(cause: OSError | None) -> None:
    if cause is None:
        raise RuntimeError("failed to add tests")
    try:
        raise cause
    except OSError as error:
        raise RuntimeError("failed to add tests") from error


def caught(cause: OSError | None) -> ExceptionInfo:
    try:
        fail(cause)
    except RuntimeError as error:
        return ExceptionInfo.from_exception(error)
    raise AssertionError


def test_message_names_root_cause():
    assert _message(caught(OSError("disk full"))) == "failed to add tests (caused by OSError: disk full)"


def test_message_without_cause_is_unchanged():
    assert _message(caught(None)) == "failed to add tests"


@pytest.mark.parametrize(
    ("stop", "outcome"),
    [("max_turns", Outcome.turn_limit), ("context_length", Outcome.agent_error), (None, Outcome.agent_error)],
)
def test_earlier_step_ended_at_the_trials_limit_only_if_its_error_names_it(stop: str | None, outcome: Outcome):
    step, last = StepResult(step_name="one"), StepResult(step_name="two")
    step.exception_info = ExceptionInfo(
        exception_type="NonZeroAgentExitCodeError",
        exception_message="Command failed (exit 1): 400 rollout stopped: max_turns",
        exception_traceback="in _run_agent_phase",
        occurred_at=datetime(2026, 1, 1),
    )
    step.verifier_result = VerifierResult(rewards={"reward": 1.0})
    assert _step(step, _stop_in(step, [step, last], stop), RewardRule()).outcome is outcome
