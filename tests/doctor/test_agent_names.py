"""Agent names that the installed Harbor does not have are reported before a run, with a suggestion."""

import pytest

from harbortrainer.doctor import task_checks


def test_misspelled_agent_gets_a_suggestion(plan, source):
    (found,) = task_checks.check_agent_names(plan(sources=[source(agent="mini-swe-agnt")]))
    assert found.what == "the installed Harbor has no agent 'mini-swe-agnt'"
    assert found.do == "did you mean 'mini-swe-agent'?"
    assert found.where.endswith("orchestrator.train.source[0].env.agent.harness.agent")


@pytest.mark.parametrize("agent", ["oracle", "terminus-2", "acp:anything", "my_package.agents:Mine", "codex"])
def test_harbor_agents_and_classes_pass(plan, source, agent):
    assert list(task_checks.check_agent_names(plan(sources=[source(agent=agent)]))) == []


def test_agent_names_are_not_checked_on_prime_rl(plan, source):
    assert list(task_checks.check_agent_names(plan("prime-rl", sources=[source(agent="of-tomorrow")]))) == []
