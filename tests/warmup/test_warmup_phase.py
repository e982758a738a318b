"""The phases that a run's page shows during a warm-up."""

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

pytest.importorskip("torch")

from harbortrainer.commands import local_run
from harbortrainer.commands.local_run import make_policy
from harbortrainer.config.runfile import RunConfig
from harbortrainer.engines.local import session as local_session
from harbortrainer.environment import renderers_compat
from harbortrainer.runs.checkpoints import Progress
from harbortrainer.runs.display import Display
from harbortrainer.runs.folder import RunFolder
from harbortrainer.warmup import warmup


def test_all_of_a_warmup_is_a_phase(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    shown: list[str] = []
    display = Display()
    monkeypatch.setattr(warmup, "rollouts_of", lambda _: None)
    monkeypatch.setattr(warmup, "warm_up", lambda *_, **__: shown.extend(one.text for one in display.phases))
    config = cast("RunConfig", SimpleNamespace(warmup=object(), seed=0))
    make_policy(config, cast("RunFolder", SimpleNamespace(model=tmp_path / "model")), display)
    assert (shown, display.phases) == (["warm-up"], [])


def test_time_of_a_stopped_warmup_counts_as_warmup(monkeypatch: pytest.MonkeyPatch):
    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    session = SimpleNamespace(progress=Progress(), complete=False, start_servers=lambda: None, display=Display())
    monkeypatch.setattr(renderers_compat, "with_chat_format", lambda config: config)
    monkeypatch.setattr(local_session, "local_run", lambda *_, **__: nullcontext(session))
    monkeypatch.setattr(local_run, "make_policy", stop)
    config, run = cast("RunConfig", None), cast("RunFolder", None)
    with pytest.raises(KeyboardInterrupt):
        local_run.train(config, run, resume=False, kinds=[], release=lambda _: None)
    assert session.progress.warmup_s > 0
