"""Harbor's error policy and the outcome table: every exception of both, and the documented differences."""

import importlib
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import get_args

import pytest
from harbor.agents.factory import AgentFactory
from harbor.agents.installed.base import NonZeroAgentExitCodeError
from harbor.models.trial.config import TrialConfig
from packaging.version import Version

from harbortrainer.trials.outcome import (
    AGENT_EXIT,
    CANCELLED,
    ENGINE,
    FINAL,
    LIMITS,
    MODEL,
    SANDBOX,
    VERIFIER,
    Outcome,
    Phase,
    classify,
)
from harbortrainer.trials.trial_spec import TrialSpec, trial_config

if Version(version("harbor")) < Version("0.25"):
    pytest.skip("this Harbor has no error policy", allow_module_level=True)
error_policy = importlib.import_module("harbor.models.trial.error_policy")

OURS = SANDBOX | VERIFIER | MODEL | AGENT_EXIT | CANCELLED | FINAL | LIMITS.keys()
HARBORS = frozenset(error_policy.ERROR_POLICIES)
REWARD = {"reward": 1.0}
DOC = Path(__file__).parents[2] / "docs" / "outcomes.md"
NEWEST = Version(version("harbor")) >= Version("0.26")
"""The documented release or a later one; in 0.25 fewer rewards are valid, and other exceptions are retried."""


def reward_is_valid(exception: str) -> bool:
    policy = error_policy.policy_for(exception)
    return policy.has_valid_reward if NEWEST else policy.reward_valid


def is_retried(exception: str) -> bool:
    policy = error_policy.policy_for(exception)
    return policy.should_retry if NEWEST else policy.retry


def is_graded(exception: str) -> bool:
    policy = error_policy.policy_for(exception)
    return policy.should_grade if NEWEST else policy.grade


def ours(exception: str, phase: Phase = "agent") -> Outcome:
    return classify(rewards=REWARD, exception=exception, phase=phase)


def retried_here(exception: str) -> bool:
    return ours(exception).retries > 0 and exception not in FINAL


def documented() -> set[str]:
    """The exceptions of the table of differences."""
    table = DOC.read_text().partition("| exception | Harbor")[2].partition("\n\n")[0]
    cells = [line.split("|")[1] for line in table.splitlines()[2:]]
    return {name for cell in cells for name in cell.split("`")[1::2]}


@pytest.mark.parametrize("exception", sorted(OURS | HARBORS))
def test_nothing_trains_that_harbor_calls_invalid(exception: str) -> None:
    if ours(exception).trains:
        assert exception in HARBORS and reward_is_valid(exception)
        assert is_graded(exception), "without grading there is no reward"


@pytest.mark.parametrize("exception", sorted(HARBORS))
def test_every_difference_is_documented(exception: str) -> None:
    differs = (ours(exception).trains, retried_here(exception)) != (reward_is_valid(exception), is_retried(exception))
    assert not differs or exception in documented()
    assert differs or exception not in documented() or not NEWEST


@pytest.mark.parametrize("phase", get_args(Phase.__value__))
def test_unknown_exception_never_trains(phase: Phase) -> None:
    assert reward_is_valid("NobodyKnowsThisError") is NEWEST, "Harbor 0.26 counts its reward"
    assert not ours("NobodyKnowsThisError", phase).trains
    assert retried_here("NobodyKnowsThisError") and is_retried("NobodyKnowsThisError")


def test_agents_errors_are_exits_or_limits() -> None:
    """Harbor derives them from the output of an agent's program."""
    for path in AgentFactory._AGENT_MAP.values():
        importlib.import_module(path.partition(":")[0])
    found = {error.__name__ for error in _with_subclasses(NonZeroAgentExitCodeError)}
    assert found >= {"ApiRateLimitError", "UnknownApiError"}
    assert found <= AGENT_EXIT | LIMITS.keys()


def _with_subclasses(error: type[Exception]) -> Iterator[type[Exception]]:
    yield error
    for derived in error.__subclasses__():
        yield from _with_subclasses(derived)


@pytest.mark.skipif(not NEWEST, reason="a Harbor without overrides")
@pytest.mark.parametrize("exception", sorted(SANDBOX | ENGINE | FINAL))
def test_harbor_does_not_grade_after_our_failures(exception: str, tmp_path: Path) -> None:
    config = trial_config(TrialSpec(task_dir=tmp_path, trials_dir=tmp_path, trial_name="t"))
    config = TrialConfig.model_validate_json(config.model_dump_json())
    policy = error_policy.policy_for(exception, getattr(config, "override_error_policy")[exception])  # noqa: B009
    assert (policy.should_grade, policy.has_valid_reward) == (False, False)
    assert not ours(exception).trains
