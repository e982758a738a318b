"""A provider of sandboxes that is given up ends a run, an evaluation and `serve-env`."""

import asyncio
import signal
from collections.abc import Coroutine
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from harbortrainer.commands import serve_env
from harbortrainer.engines.env_server import EnvServer
from harbortrainer.engines.local.session import Session
from harbortrainer.errors import RunStoppedError
from harbortrainer.evaluation.measuring import EvalRunner
from harbortrainer.runs.folder import RunFolder
from harbortrainer.trials import start_watch
from harbortrainer.trials.sandbox_starts import STARTS, StartState


class Idle:
    """A server that serves for ever; also what a session, an evaluation or a stop request has to offer here."""

    alive, name, restarts = True, "idle", 0

    def start(self) -> None:
        """Start nothing."""

    def close(self) -> None:
        """Close nothing."""

    def address(self) -> str:
        return "tcp://127.0.0.1:1"

    async def wait(self) -> None:
        await asyncio.Event().wait()


async def _play_all(*_: object) -> None:
    await asyncio.Event().wait()


def _session(folder: Path) -> Coroutine[object, object, object]:
    session = Session.__new__(Session)
    session.run, session.kinds, session.servers = RunFolder(folder), [], {"a": cast("EnvServer", Idle())}
    session.trial_folders = [folder / "trials"]
    session.display = SimpleNamespace(line=print)  # ty: ignore[invalid-assignment]
    return session._watch([])


def _evaluation(folder: Path) -> Coroutine[object, object, object]:
    evaluation = EvalRunner.__new__(EvalRunner)
    rules = SimpleNamespace(environment_type="modal")
    evaluation.folder = SimpleNamespace(path=folder / "trials", spec=SimpleNamespace(rules=rules))  # ty: ignore[invalid-assignment]
    evaluation.display = SimpleNamespace(line=print)  # ty: ignore[invalid-assignment]
    evaluation.remote = evaluation.client = None
    evaluation._play_all = _play_all  # ty: ignore[invalid-assignment]
    return evaluation.until_done(cast("EnvServer", Idle()), [], Idle())  # ty: ignore[invalid-argument-type]


def _serving(folder: Path) -> Coroutine[object, object, object]:
    return serve_env.serve(cast("EnvServer", Idle()), "serving at {}", lambda _: [], [folder / "trials"])


@pytest.mark.parametrize("start", [_session, _evaluation, _serving])
async def test_provider_given_up_ends(start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(start_watch, "_REPORT_S", 0.01)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    state = tmp_path / "trials" / STARTS / "modal.json"
    (tmp_path / "trials").mkdir()
    running = asyncio.create_task(start(tmp_path))
    done, _ = await asyncio.wait({running}, timeout=0.2)
    assert not done
    state.parent.mkdir()
    state.write_text(StartState(given_up=True, failing_since=0.0, ended=1830.0, fault="no capacity").model_dump_json())
    with pytest.raises(RunStoppedError, match=r"no capacity; .* continue with --resume"):
        async with asyncio.timeout(10):
            await running
