"""What processes wait for is found whenever one looks, and a process that works is not blamed."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from harbortrainer.sandbox.inside import file_waits
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

WORKS_THEN_READS = """
import os, sys
print("works", flush=True)
while not os.path.exists(sys.argv[1]):
    pass
open(sys.argv[2])
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


def test_pipe_that_a_busy_process_uses_later_is_no_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    signal, pipe, pauses = tmp_path / "signal", tmp_path / "pipe", []
    os.mkfifo(pipe)
    words = [sys.executable, "-c", WORKS_THEN_READS, str(signal), str(pipe)]
    process = subprocess.Popen(words, stdout=subprocess.PIPE)
    always = Period(0, time.time_ns() * 2)

    def use_pipe(seconds: float) -> None:
        """Have the process read the pipe between the first look and the second."""
        pauses.append(seconds)
        signal.touch()
        while " S " not in Path(f"/proc/{process.pid}/stat").read_text():
            pass

    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"works\n"
        with monkeypatch.context() as patch:
            patch.setattr(file_waits.time, "sleep", use_pipe)
            assert (describe_waits([process.pid], always), len(pauses)) == ([], 1)
        assert "waited for the pipe" in describe_waits([process.pid], always)[0]
    finally:
        process.kill()
        process.wait()
