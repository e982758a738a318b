"""How long the end of a run waits for a sampler in a long forward pass."""

import time
from types import SimpleNamespace

import pytest

from harbortrainer.engines.local import session
from harbortrainer.engines.local.session import Session


@pytest.mark.parametrize(("status", "closed"), [("interrupted", False), ("stopped", True), ("finished", True)])
def test_only_interrupt_leaves_sampler_running(status: str, closed: bool, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(session, "STOP_S", session.UPDATE_GRACE_S + 0.05)
    ending = Session.__new__(Session)
    ending.servers = {}
    ending.sampler = SimpleNamespace(stop=lambda: time.sleep(0.5))  # ty: ignore[invalid-assignment]
    ending.run = SimpleNamespace(metrics=SimpleNamespace(close=lambda _: None))  # ty: ignore[invalid-assignment]
    ending.status = status  # ty: ignore[invalid-assignment]
    assert ending.close() is closed
