"""Ended trials whose agent or sandbox keeps itself in a reference cycle do not pile up in memory."""

import gc
import weakref
from types import SimpleNamespace

import pytest

from harbortrainer.runs.memory import EndedObjects
from harbortrainer.trials import runner


class Ended(SimpleNamespace):
    """A trial."""


class Part:
    """An agent or a sandbox; it may keep itself in a cycle, as one with a bound method as a callback does."""

    def __init__(self, *, cycle: bool) -> None:
        self.itself = self if cycle else None


@pytest.mark.parametrize("cyclic", ["agent", "sandbox"])
def test_parts_in_cycles_are_collected(cyclic: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "_ENDED", EndedObjects(most=8))
    alive = weakref.WeakSet[Part]()
    gc.disable()
    try:
        for _ in range(50):
            agent, sandbox = Part(cycle=cyclic == "agent"), Part(cycle=cyclic == "sandbox")
            alive.update([agent, sandbox])
            runner._ENVIRONMENTS.set([sandbox])  # ty: ignore[invalid-argument-type]
            with runner._freed_at_end(Ended(agent=agent, _hooks={})):  # ty: ignore[invalid-argument-type]
                del agent, sandbox
    finally:
        gc.enable()
    assert len(alive) <= 9
