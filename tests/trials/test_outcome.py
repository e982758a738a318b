"""The outcome table, and classification of what Harbor recorded."""

import math

import pytest

from harbortrainer.trials.outcome import Outcome, classify, outcome_of_refusal, outcome_of_stop, worst

ONE = {"reward": 1.0}


def test_every_outcome_has_a_row():
    columns = {"blame", "trains", "flagged", "retries", "pause_s"}
    assert all(columns <= vars(outcome).keys() for outcome in Outcome)


def test_only_outcomes_of_the_policy_train():
    assert {outcome for outcome in Outcome if outcome.trains} == {
        outcome
        for outcome in Outcome
        if outcome.blame == "policy" and outcome not in {Outcome.timeout_masked, Outcome.tampered}
    }


def test_no_outcome_is_both_trained_on_and_retried():
    assert not [outcome for outcome in Outcome if outcome.trains and outcome.retries]


def test_a_finished_trial_is_completed():
    assert classify(rewards={"reward": 0.0}) is Outcome.completed


@pytest.mark.parametrize("rewards", [None, {}, {"reward": math.nan}, {"reward": 1.0, "style": math.inf}])
@pytest.mark.parametrize("ending", [None, *(outcome for outcome in Outcome if outcome.flagged)])
def test_nothing_trains_without_finite_rewards(rewards, ending):
    assert classify(rewards=rewards, ending=ending) is Outcome.verifier_error


def test_agent_timeout_keeps_the_verifiers_reward():
    assert classify(rewards=ONE, exception="AgentTimeoutError") is Outcome.agent_timeout


def test_agent_timeout_without_reward_is_verifier_error():
    assert classify(rewards=None, exception="AgentTimeoutError") is Outcome.verifier_error


@pytest.mark.parametrize(
    ("exception", "phase", "outcome"),
    [
        ("EnvironmentStartTimeoutError", "environment_setup", Outcome.sandbox_error),
        ("RuntimeError", "environment_setup", Outcome.sandbox_error),
        ("AgentSetupTimeoutError", "agent_setup", Outcome.agent_error),
        ("SandboxDiedError", "agent", Outcome.sandbox_error),
        ("SandboxDiedError", "verification", Outcome.sandbox_error),
        ("RuntimeError", "agent", Outcome.agent_error),
        ("NonZeroAgentExitCodeError", "agent", Outcome.agent_error),
        ("InternalServerError", "agent", Outcome.model_error),
        ("ModelServerError", "agent", Outcome.model_error),
        ("RuntimeError", "verification", Outcome.verifier_error),
        ("ReadTimeout", "verification", Outcome.verifier_error),
        ("VerifierTimeoutError", "verification", Outcome.verifier_error),
        ("RewardFileNotFoundError", "verification", Outcome.verifier_error),
        ("VerifierOutputParseError", "verification", Outcome.verifier_error),
        ("CancelledError", "agent", Outcome.cancelled),
    ],
)
def test_failure_is_attributed_to_its_cause(exception, phase, outcome):
    assert classify(rewards=None, exception=exception, phase=phase) is outcome
    assert not outcome.trains


def test_agent_failure_with_reward_does_not_train():
    assert classify(rewards=ONE, exception="InternalServerError") is Outcome.model_error
    assert classify(rewards=ONE, exception="NonZeroAgentExitCodeError") is Outcome.agent_error


def test_agent_failure_after_stop_is_the_limit():
    stopped = classify(rewards=ONE, exception="NonZeroAgentExitCodeError", stop="max_turns")
    assert stopped is Outcome.turn_limit


def test_endpoint_refusal_with_reward_is_the_limit():
    message = "Error code: 400 - rollout stopped: context_length"
    assert classify(rewards=ONE, exception="BadRequestError", message=message) is Outcome.context_limit
    assert classify(rewards=None, exception="BadRequestError", message=message) is Outcome.agent_error


def test_text_of_a_program_is_no_refusal_of_the_endpoint():
    """The program of an installed agent prints what its model says."""
    for said in ("rollout stopped: max_turns", "rollout stopped: all_done"):
        found = classify(rewards=ONE, exception="NonZeroAgentExitCodeError", message=f"Command failed (exit 1): {said}")
        assert found is Outcome.agent_error, said


def test_context_length_error_is_limit_only_with_reward():
    assert classify(rewards=ONE, exception="ContextLengthExceededError") is Outcome.context_limit
    assert classify(rewards=None, exception="ContextLengthExceededError") is Outcome.agent_error


def test_stop_conditions_map_to_outcomes():
    assert outcome_of_stop("found_it") is Outcome.completed
    assert outcome_of_stop("error") is None
    assert outcome_of_refusal("400: rollout stopped: max_turns") is Outcome.turn_limit
    assert outcome_of_refusal("500: broken") is None


def test_worst_step_outcome_is_the_trials():
    assert worst([Outcome.completed, Outcome.agent_timeout]) is Outcome.agent_timeout
    assert worst([Outcome.agent_timeout, Outcome.verifier_error]) is Outcome.verifier_error
