"""The socket folder is private and removed with the process that created it."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from patience import wait_until

from harbortrainer.engines.socket_folder import SocketFolder
from harbortrainer.errors import UserError

CREATE_FOLDER = """
import sys
from harbortrainer.engines.socket_folder import SocketFolder

folder = SocketFolder("test-", name_length=10)
(folder.path / "s").touch()
print(folder.path, flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_folder_is_removed_however_process_ends(tmp_path: Path, number: int) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", CREATE_FOLDER],
        env=os.environ | {"TMPDIR": str(tmp_path)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    ) as process:
        assert process.stdout is not None
        path = Path(process.stdout.readline().decode().strip())
        assert path.parent == tmp_path and list(path.iterdir())
        os.killpg(process.pid, number)
    wait_until(lambda: not path.exists())


def test_remove_deletes_folder_at_once() -> None:
    folder = SocketFolder("test-", name_length=10)
    (folder.path / "s").touch()
    folder.remove()
    assert not folder.path.exists()
    folder.remove()


def test_folder_is_private() -> None:
    folder = SocketFolder("test-", name_length=10)
    mode = folder.path.stat().st_mode & 0o777
    folder.remove()
    assert mode == 0o700


def test_refuses_path_too_long_for_socket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with pytest.raises(UserError, match="set TMPDIR to a shorter path"):
        SocketFolder("test-", name_length=100)
    assert list(tmp_path.iterdir()) == []
