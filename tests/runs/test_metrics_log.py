"""The file has all metrics; a monitor gets each line once across resumes, and never ends the run."""

import struct
from collections.abc import Mapping
from pathlib import Path

import pytest
from patience import wait_until

from harbortrainer.config.run_sections import WandbKeys
from harbortrainer.config.runfile import RunConfig
from harbortrainer.errors import UserError
from harbortrainer.runs import monitors
from harbortrainer.runs.durable import read_lines
from harbortrainer.runs.metrics_log import MetricsLog
from harbortrainer.runs.monitors import TensorboardMonitor, WandbMonitor, imported, require_monitors

pytestmark = pytest.mark.process


class Listener:
    """A monitor that records its lines, and fails at a given line."""

    def __init__(self, name: str = "listener", fails_at: int | None = None) -> None:
        self.name, self.fails_at = name, fails_at
        self.heard: list[int] = []
        self.known_as: str | None = None
        self.closed = False

    def open(self, known_as: str | None) -> str:
        self.known_as = known_as
        return known_as or "its-own-name"

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        if step == self.fails_at:
            raise ConnectionError("the network is gone\nfor good")
        assert "step" not in figures and None not in figures.values()
        self.heard.append(step)

    def close(self) -> None:
        self.closed = True


def steps(log: MetricsLog, *numbers: int) -> None:
    for step in numbers:
        log.write({"step": step, "loss": 0.5, "eval/low": None})
        log.publish()


def test_monitor_gets_each_line_once_across_resume(tmp_path: Path) -> None:
    first, late = Listener(), Listener("late")
    log = MetricsLog(tmp_path / "metrics.jsonl")
    log.start([first], print)
    steps(log, 1, 2)
    log.write({"step": 3})
    again = Listener()
    resumed = MetricsLog(tmp_path / "metrics.jsonl")
    resumed.start([again, late], print)
    steps(resumed, 4)
    resumed.close(5.0)
    assert (first.heard, first.known_as) == ([1, 2], None), "step 3 was not finished when the run was killed"
    assert (again.heard, again.known_as) == ([3, 4], "its-own-name")
    assert late.heard == [1, 2, 3, 4] and late.closed


@pytest.mark.parametrize("listens", [True, False])
def test_sent_lines_are_not_kept_in_memory(tmp_path: Path, listens: bool) -> None:
    log = MetricsLog(tmp_path / "metrics.jsonl")
    log.start([Listener()] if listens else [], print)
    steps(log, *range(20))
    assert not log._unsent
    log.write({"step": 20})
    assert len(log._unsent) == 1


def test_failing_monitor_is_reported_once(tmp_path: Path) -> None:
    said: list[str] = []
    bad, good = Listener("bad", fails_at=2), Listener("good")
    log = MetricsLog(tmp_path / "metrics.jsonl")
    log.start([bad, good], said.append)
    steps(log, 1, 2, 3)
    log.close(5.0)
    assert (bad.heard, bad.closed, good.heard) == ([1], False, [1, 2, 3])
    assert len(said) == 1 and said[0].startswith("warning: bad failed") and "\n" not in said[0]
    assert [row["step"] for row in read_lines(log.file)] == [1, 2, 3]
    mended = Listener("bad")
    log = MetricsLog(tmp_path / "metrics.jsonl")
    log.start([mended], said.append)
    assert mended.heard == [2, 3]


def test_wandb_offline_resume_continues_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_CACHE_DIR", str(tmp_path / "cache"))
    said: list[str] = []
    for step in (1, 2):
        log = MetricsLog(tmp_path / "metrics.jsonl")
        log.start([WandbMonitor(WandbKeys(project="p", tags=["a"]), tmp_path, {"seed": 1})], said.append)
        steps(log, step)
        log.close(60.0)
    assert said == []
    files = sorted(tmp_path.glob("wandb/offline-run-*/run-*.wandb"))
    assert len(files) == 2 and len({path.name for path in files}) == 1
    # W&B's own process writes them; its last word to us may come before its last to the disk.
    wait_until(lambda: all(b"loss" in path.read_bytes() for path in files), lambda: [p.stat().st_size for p in files])


def test_tensorboard_reads_written_metrics(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path / "metrics.jsonl")
    log.start([TensorboardMonitor(tmp_path)], print)
    steps(log, 1, 2)
    log.close(5.0)
    found = [event for path in (tmp_path / "tensorboard").iterdir() for event in events(path)]
    assert [(e.step, v.tag, v.simple_value) for e in found for v in e.summary.value] == [
        (1, "loss", 0.5),
        (2, "loss", 0.5),
    ]


def events(path: Path):
    """Read the events of a file; each is a length, its checksum, a message, its checksum."""
    message, data = imported("tensorboardX.proto.event_pb2").Event, path.read_bytes()
    while data:
        (length,) = struct.unpack("<Q", data[:8])
        yield message.FromString(data[12 : 12 + length])
        data = data[16 + length :]


def test_missing_monitor_package_is_reported_first(monkeypatch: pytest.MonkeyPatch) -> None:
    table = {"trainer": {"model": {"lora": {}}}, "orchestrator": {"train": {"source": [{"env": {"id": "x"}}]}}}
    require_monitors(RunConfig.model_validate(table))
    monkeypatch.setattr(monitors, "find_spec", lambda name: None)
    require_monitors(RunConfig.model_validate(table))
    for own, told in (({"monitors": {"wandb": {}}}, "wandb"), ({"tensorboard": True}, "tensorboardX")):
        with pytest.raises(UserError, match=f"{told} is not installed; remove that key, or run `uv sync"):
            require_monitors(RunConfig.model_validate(table | own))
