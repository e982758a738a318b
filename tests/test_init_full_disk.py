"""`init` leaves no partial run file if it cannot write one."""

from pathlib import Path

import pytest

from harbortrainer.commands.init import write_new
from harbortrainer.errors import UserError


def test_failed_write_leaves_no_run_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_args: object, **_options: object) -> int:
        raise OSError(28, "No space left on device")

    file = tmp_path / "run.toml"
    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", full)
        with pytest.raises(UserError, match="cannot be written: No space left on device") as error:
            write_new(file, "max_steps = 1\n")
    assert error.value.where == str(file)
    assert not file.exists()
    write_new(file, "max_steps = 1\n")
    with pytest.raises(UserError, match="cannot be written: File exists"):
        write_new(file, "max_steps = 2\n")
    assert file.read_text() == "max_steps = 1\n"
