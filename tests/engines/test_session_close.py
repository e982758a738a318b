"""The start and the end of a session: the config that it gets, and how long its end waits for a sampler."""

import time
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest

from harbortrainer.commands.local_run import train
from harbortrainer.config.orchestrator_config import APPENDING_TEMPLATE
from harbortrainer.config.reader import load
from harbortrainer.engines.local import session
from harbortrainer.engines.local.session import Session
from harbortrainer.runs.folder import RunFolder


@pytest.mark.parametrize(("status", "closed"), [("interrupted", False), ("stopped", True), ("finished", True)])
def test_only_interrupt_leaves_sampler_running(status: str, closed: bool, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(session, "STOP_S", session.UPDATE_GRACE_S + 0.05)
    ending = Session.__new__(Session)
    ending.servers = {}
    ending.sampler = SimpleNamespace(stop=lambda: time.sleep(0.5))  # ty: ignore[invalid-assignment]
    ending.run = SimpleNamespace(metrics=SimpleNamespace(close=lambda _: None))  # ty: ignore[invalid-assignment]
    ending.status = status  # ty: ignore[invalid-assignment]
    assert ending.close() is closed


def test_session_gets_the_chat_format_that_auto_means(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    seen = []
    ended = SimpleNamespace(complete=True, status="finished")
    monkeypatch.setattr(session, "local_run", lambda config, *_, **__: seen.append(config) or nullcontext(ended))
    config = load(Path(__file__).parents[2] / "configs" / "laptop.toml")
    train(config, RunFolder(tmp_path), resume=True, release=lambda _: None)
    assert (config.orchestrator.renderer["name"], seen[0].orchestrator.renderer) == ("auto", APPENDING_TEMPLATE)
