"""What processes wait for is found whenever one looks."""

import subprocess
import sys
from pathlib import Path

import pytest

from harbortrainer.sandbox.inside.file_waits import Period, describe_waits

pytestmark = pytest.mark.process

LEASE = """
import fcntl, signal, sys
signal.signal(signal.SIGIO, signal.SIG_IGN)
file = open(sys.argv[1])
fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_WRLCK)
print("leased", flush=True)
signal.pause()
"""


def test_reader_of_leased_file_is_found_at_each_look(tmp_path: Path):
    """The kernel wakes such a reader at each tick, so it sometimes runs."""
    path = tmp_path / "answer"
    path.write_text("x")
    holder = subprocess.Popen([sys.executable, "-c", LEASE, str(path)], stdout=subprocess.PIPE)
    reader = None
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"leased\n"
        reader = subprocess.Popen(["cat", str(path)], stdout=subprocess.DEVNULL)
        while not describe_waits([reader.pid], Period(0, 0)):
            assert reader.poll() is None
        expected = f"the verifier waited to open '{path}', on which another process holds a lease"
        assert {tuple(describe_waits([reader.pid], Period(0, 0))) for _ in range(1000)} == {(expected,)}
    finally:
        for process in (holder, reader):
            if process is not None:
                process.kill()
                process.wait()
