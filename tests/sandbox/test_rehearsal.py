"""What the nursery does before it starts any sandbox."""

from pathlib import Path

from harbortrainer.sandbox.inside.rehearsal import rehearse


def test_the_rehearsal_leaves_nothing_behind(tmp_path: Path) -> None:
    rehearse(str(tmp_path / "rehearsal"))
    assert list(tmp_path.iterdir()) == []
