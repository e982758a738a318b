"""The folder of vLLM's sockets goes with the process that made it."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from patience import wait_until

from harbortrainer.engines.vllm.socket_room import SocketRoom

MAKES_ONE = """
import sys
from harbortrainer.engines.vllm.socket_room import SocketRoom

room = SocketRoom()
(room.path / "s").touch()
print(room.path, flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_it_goes_with_the_process_however_that_ends(tmp_path: Path, number: int) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", MAKES_ONE],
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


def test_it_is_removed_at_once_when_it_is_done_with() -> None:
    room = SocketRoom()
    (room.path / "s").touch()
    room.remove()
    assert not room.path.exists()
    room.remove()
