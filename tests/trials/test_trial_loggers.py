"""Loggers that Harbor has named after an ended trial are removed."""

import logging

import pytest

from harbortrainer.harbor_compat import forget_loggers

HARBOR = "harbor_of_this_test.logger"


@pytest.fixture
def loggers():
    known = logging.root.manager.loggerDict
    before = set(known)
    yield known
    for name in set(known) - before:
        del known[name]


def name_loggers(trial: str) -> logging.Logger:
    """Name loggers as Harbor does for a trial and its agent."""
    own = logging.getLogger(HARBOR).getChild(f"harbor.trial.trial.{trial}")
    own.getChild("harbor.agents.base")
    return own


@pytest.mark.parametrize("task", ["fix-of-this-test", "fix-of-this-test.v1"])
def test_ended_trials_leave_no_logger(loggers: dict, task: str) -> None:
    running = name_loggers(f"{task}__a2")
    name_loggers(f"{task}__a")
    forget_loggers(f"{task}__a")
    with_one = len(loggers)
    for number in range(20):
        name_loggers(f"{task}__b{number}")
        forget_loggers(f"{task}__b{number}")
    assert len(loggers) == with_one
    assert not any(f"{task}__a." in f"{name}." or f"{task}__b" in name for name in loggers)
    listed = [own.loggerMap for own in loggers.values() if isinstance(own, logging.PlaceHolder)]
    assert not any(f"{task}__b" in child.name for children in listed for child in children)
    assert logging.getLogger(running.name) is running
    assert logging.getLogger(f"{running.name}.harbor.agents.base").parent is running
