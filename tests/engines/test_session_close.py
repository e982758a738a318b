"""The start and the end of a session: the config that it gets, and how long its end waits for a sampler."""

import time
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from harbortrainer.commands.local_run import train
from harbortrainer.config.orchestrator_config import APPENDING_TEMPLATE
from harbortrainer.config.reader import load
from harbortrainer.engines.local import session
from harbortrainer.engines.local.session import Session
from harbortrainer.errors import UserError
from harbortrainer.runs.checkpoints import Progress
from harbortrainer.runs.folder import RunFolder
from harbortrainer.runs.provenance import TaskOrigin


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
    train(config, RunFolder(tmp_path), resume=True, kinds=(), release=lambda _: None)
    assert (config.orchestrator.renderer["name"], seen[0].orchestrator.renderer) == ("auto", APPENDING_TEMPLATE)


class TasksOnly:
    """A source of tasks, without an environment server."""

    def __init__(self, name: str, keys: dict[str, str]) -> None:
        self.name, self._keys = name, keys

    def keys(self) -> dict[str, str]:
        return self._keys

    def origin(self) -> TaskOrigin:
        return TaskOrigin(source=next(iter(self._keys)))


def test_records_tasks_of_both_sources_of_one_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    starting = Session.__new__(Session)
    starting.progress, starting.run, starting.resume = Progress(), RunFolder(tmp_path), False
    starting.train_streams = {"own": TasksOnly("own", {"a": "1"})}  # ty: ignore[invalid-assignment]
    starting.eval_streams = {"own": TasksOnly("own", {"b": "2"})}  # ty: ignore[invalid-assignment]
    monkeypatch.setattr(session, "check_provenance", Mock(side_effect=UserError("recorded")))
    with pytest.raises(UserError, match="recorded"):
        starting.train("model")
    _, made_of = session.check_provenance.call_args.args  # ty: ignore[missing-attribute]
    assert made_of.tasks == {"own": {"a": "1"}, "own (evaluation)": {"b": "2"}}
    assert {name: origin.source for name, origin in made_of.origins.items()} == {"own": "a", "own (evaluation)": "b"}
