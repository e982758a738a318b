"""The live status of a run: what the file says while the run is active, and that it does not disturb the run."""

import shutil
from pathlib import Path

import pytest
from patience import wait_until

from harbortrainer.runs import live_status
from harbortrainer.runs.display import Display
from harbortrainer.runs.live_status import LIVE_FILE, ActiveTrial, LiveStatus, LiveWriter


@pytest.fixture(autouse=True)
def short_interval(monkeypatch) -> None:
    monkeypatch.setattr(live_status, "INTERVAL_S", 0.01)


def phases_in(folder: Path) -> list[tuple[str, int, int | None]]:
    return [(phase.text, phase.done, phase.total) for phase in LiveStatus.read(folder).phases]


def test_file_follows_open_bars_and_is_removed(tmp_path) -> None:
    display = Display()
    trial = ActiveTrial(task="sort", since=5.0)
    with LiveWriter(tmp_path, lambda: LiveStatus(since=1.0, phases=display.phases, trials=[trial])):
        with display.bar("steps", 3, plain=False) as steps, display.bar("sampling", 8) as sampling:
            steps.set(1)
            sampling.advance(2)
            wait_until(lambda: phases_in(tmp_path) == [("steps", 1, 3), ("sampling", 2, 8)])
            assert LiveStatus.read(tmp_path).trials == [trial]
        wait_until(lambda: (tmp_path / LIVE_FILE).exists() and phases_in(tmp_path) == [])
    assert list(tmp_path.iterdir()) == []


def test_unchanged_status_is_written_once(tmp_path) -> None:
    calls: list[int] = []

    def status() -> LiveStatus:
        calls.append((tmp_path / LIVE_FILE).stat().st_ino if calls else 0)
        return LiveStatus(since=1.0)

    with LiveWriter(tmp_path, status):
        wait_until(lambda: len(calls) > 5)
    assert len(set(calls[1:6])) == 1


def test_removed_folder_does_not_end_the_writer(tmp_path) -> None:
    folder, calls = tmp_path / "run", list[int]()
    folder.mkdir()
    with LiveWriter(folder, lambda: LiveStatus(since=float(calls.append(1) or len(calls)))):
        wait_until(lambda: (folder / LIVE_FILE).exists())
        # The writer may have made its file anew meanwhile.
        wait_until(lambda: shutil.rmtree(folder, ignore_errors=True) or not folder.exists())
        before = len(calls)
        wait_until(lambda: len(calls) > before + 2)
        assert not folder.exists()


@pytest.mark.parametrize("content", [b"", b"{", b'{"phases": 3}', b"\xff"])
def test_damaged_file_is_an_empty_status(tmp_path, content: bytes) -> None:
    (tmp_path / LIVE_FILE).write_bytes(content)
    assert LiveStatus.read(tmp_path) == LiveStatus()
