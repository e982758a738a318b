"""The phases that a run's page shows during a warm-up."""

from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

pytest.importorskip("torch")

from harbortrainer.commands.local_run import make_policy
from harbortrainer.config.runfile import RunConfig
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
