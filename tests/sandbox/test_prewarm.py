"""Prewarming of the fork server."""

from pathlib import Path

from harbortrainer.sandbox.inside.fork_server import prewarm


def test_prewarm_leaves_no_files(tmp_path: Path) -> None:
    prewarm(str(tmp_path / "prewarm"))
    assert list(tmp_path.iterdir()) == []
