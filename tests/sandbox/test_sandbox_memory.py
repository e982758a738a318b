"""Memory without control groups, as an ordinary user and as root: everything counts, also when no command runs."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from test_sandbox_user import as_nobody

LIMIT_MB = 320
SCRIPT = """
import asyncio, json, os, resource, sys, time
from pathlib import Path
from harbortrainer.sandbox import host_view, nursery_client
from harbortrainer.sandbox.guest import Guest
from harbortrainer.sandbox.inside.messages import Command, SandboxSpec

HOGS = {
    "own": "x = b'x' * (40 << 20)",
    "shared": "import mmap; m = mmap.mmap(-1, 40 << 20); m.write(b'x' * (40 << 20))",
    "shared and let go": "import mmap; m = mmap.mmap(-1, 40 << 20); m.write(b'x' * (40 << 20)); m.madvise(4)",
    "a file without a name": "import os; f = os.memfd_create('m'); "
                             "[os.write(f, b'x' * (1 << 20)) for _ in range(40)]",
    "files in memory": "import tempfile; f = tempfile.NamedTemporaryFile(dir='/dev/shm'); "
                       "f.write(b'x' * (40 << 20)); f.flush()",
    "System V": "import ctypes; c = ctypes.CDLL(None); c.shmat.restype = ctypes.c_void_p; "
                "i = c.shmget(0, 40 << 20, 0o1600); a = c.shmat(i, None, 0); ctypes.memset(a, 1, 40 << 20); "
                "c.shmdt(ctypes.c_void_p(a))",
}
LIVE = r'''
import os
own = shared = 0
seen = {}
for pid in filter(str.isdigit, os.listdir("/proc")):
    try:
        own += sum(int(l.split()[1]) for l in open(f"/proc/{pid}/status") if l.startswith("RssAnon")) >> 10
        for line in open(f"/proc/{pid}/maps"):
            f = line.split(None, 5)
            if len(f) == 6 and f[1].endswith("s") and f[5].startswith(("/dev/zero", "/memfd")):
                low, high = f[0].split("-")
                seen[f[4]] = (int(high, 16) - int(low, 16)) >> 20
        for fd in os.listdir(f"/proc/{pid}/fd"):
            if os.readlink(f"/proc/{pid}/fd/{fd}").startswith("/memfd:"):
                s = os.stat(f"/proc/{pid}/fd/{fd}")
                seen[str(s.st_ino)] = s.st_blocks >> 11
    except OSError:
        pass
segments = sum(int(l.split()[14]) for l in list(open("/proc/sysvipc/shm"))[1:]) >> 20
disk = os.statvfs("/")
print(own + sum(seen.values()) + segments + ((disk.f_blocks - disk.f_bfree) * disk.f_frsize >> 20))
'''

async def live(guest):
    done = await guest.run(Command(["python3", "-c", LIVE]), seconds=60)
    return int(done.stdout)

async def main():
    view, said = host_view.view_of(Path("/")), {}
    for name, hog in HOGS.items():
        guest = await Guest.start(SandboxSpec(disk_mb=64, memory_bytes=LIMIT << 20, pids=200), view)
        keep = f"{hog}; import time; time.sleep(500)"
        # Left behind: no command of the host's runs while the memory is taken.
        start = "for i in {1..25}; do setsid python3 -c " + json.dumps(keep) + " >/dev/null 2>&1 & done"
        await guest.run(Command(["/bin/bash", "-c", start]), seconds=60)
        await asyncio.sleep(6)
        said[name] = [await live(guest), guest.ended, len(guest.notes)]
        alive = await guest.run(Command(["/bin/echo", "alive"]), seconds=60)
        assert alive.stdout == b"alive\\n"
        await guest.stop()
    guest = await Guest.start(SandboxSpec(disk_mb=64, memory_bytes=LIMIT << 20, pids=60), view)
    # Bounded: where the watch is too slow, as on a busy machine, a bomb would take the machine down, tests and all.
    flood = "for i in {1..300}; do sleep 500 & done"
    await guest.run(Command(["/bin/bash", "-c", f"({flood}) >/dev/null 2>&1 &"]), seconds=60)
    await asyncio.sleep(3)
    count = "n=0; for d in /proc/[0-9]*; do n=$((n+1)); done; echo $n"
    done = await guest.run(Command(["/bin/bash", "-c", count]), seconds=60)
    said["processes"] = [int(done.stdout), guest.ended, 0]
    await guest.stop()
    print(json.dumps(said))

LIMIT = int(sys.argv[1])
asyncio.run(main())
"""


WITHOUT_GROUPS = ["unshare", "--mount", "sh", "-c", 'mount -t tmpfs none /sys/fs/cgroup && exec "$@"', "sh"]


@pytest.fixture(scope="module", params=["user", "root"])
def lived(request: pytest.FixtureRequest) -> dict[str, tuple[int, bool, int]]:
    """For each kind of memory: MB that lived in the end, whether the sandbox had ended, and what was noted."""
    command = [sys.executable, "-c", SCRIPT, str(LIMIT_MB)]
    environment: dict[str, str] = {"PATH": os.defpath}
    if os.geteuid() == 0:
        if shutil.which("setpriv") is None or shutil.which("unshare") is None:
            pytest.skip("util-linux is not here to become an ordinary user with")
        if request.param == "user":
            command, more = as_nobody(command)
            environment |= more
        else:
            command = [*WITHOUT_GROUPS, *command]
            environment["PYTHONPATH"] = str(Path(__file__).parents[2] / "src")
    elif request.param == "root":
        pytest.skip("this is an ordinary user")
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, cwd="/")
    if "Operation not permitted" in done.stderr and "SandboxStartError" in done.stderr:
        pytest.skip(f"the kernel gives ordinary users no namespaces: {done.stderr.strip().splitlines()[-1]}")
    assert done.returncode == 0, done.stdout + done.stderr
    return {name: tuple(found) for name, found in json.loads(done.stdout.splitlines()[-1]).items()}


KINDS = ["own", "shared", "shared and let go", "System V", "files in memory", "a file without a name"]


@pytest.mark.parametrize("kind", KINDS)
def test_what_lives_in_a_sandbox_stays_below_its_limit(lived, kind):
    used_mb, ended, _ = lived[kind]
    assert used_mb <= LIMIT_MB + 20  # Python itself, which asks
    assert not ended


@pytest.mark.parametrize("kind", KINDS[:4])
def test_what_was_killed_is_noted(lived, kind):
    assert lived[kind][2] > 0


def test_processes_stay_below_their_limit_too(lived):
    assert lived["processes"][0] <= 60 + 5
