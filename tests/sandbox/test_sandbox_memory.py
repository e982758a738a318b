"""Memory limit without cgroups: all memory counts, even while no command runs. Tested as ordinary user and as root."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from ordinary_user import as_nobody

LIMIT_MB = 320
SCRIPT = """
import asyncio, json, os, resource, sys, time
from pathlib import Path
from harbortrainer.sandbox import fork_server_client, host_view
from harbortrainer.sandbox.running_sandbox import RunningSandbox
from harbortrainer.sandbox.inside.messages import Command, SandboxSpec

HOGS = {
    "private": "x = b'x' * (40 << 20)",
    "shared": "import mmap; m = mmap.mmap(-1, 40 << 20); m.write(b'x' * (40 << 20))",
    "shared with dropped pages": "import mmap; m = mmap.mmap(-1, 40 << 20); m.write(b'x' * (40 << 20)); m.madvise(4)",
    "memfd": "import os; f = os.memfd_create('m'); "
                             "[os.write(f, b'x' * (1 << 20)) for _ in range(40)]",
    "tmpfs file": "import tempfile; f = tempfile.NamedTemporaryFile(dir='/dev/shm'); "
                       "f.write(b'x' * (40 << 20)); f.flush()",
    "System V segment": "import ctypes; c = ctypes.CDLL(None); c.shmat.restype = ctypes.c_void_p; "
                "i = c.shmget(0, 40 << 20, 0o1600); a = c.shmat(i, None, 0); ctypes.memset(a, 1, 40 << 20); "
                "c.shmdt(ctypes.c_void_p(a))",
}
MEASURE_MB = r'''
import os
private = 0
shared_files = {}
for pid in filter(str.isdigit, os.listdir("/proc")):
    try:
        private += sum(int(l.split()[1]) for l in open(f"/proc/{pid}/status") if l.startswith("RssAnon")) >> 10
        for line in open(f"/proc/{pid}/maps"):
            f = line.split(None, 5)
            if len(f) == 6 and f[1].endswith("s") and f[5].startswith(("/dev/zero", "/memfd")):
                low, high = f[0].split("-")
                shared_files[f[4]] = (int(high, 16) - int(low, 16)) >> 20
        for fd in os.listdir(f"/proc/{pid}/fd"):
            if os.readlink(f"/proc/{pid}/fd/{fd}").startswith("/memfd:"):
                s = os.stat(f"/proc/{pid}/fd/{fd}")
                shared_files[str(s.st_ino)] = s.st_blocks >> 11
    except OSError:
        pass
segments = sum(int(l.split()[14]) for l in list(open("/proc/sysvipc/shm"))[1:]) >> 20
disk = os.statvfs("/")
print(private + sum(shared_files.values()) + segments + ((disk.f_blocks - disk.f_bfree) * disk.f_frsize >> 20))
'''

async def used_mb(sandbox):
    result = await sandbox.run(Command(["python3", "-c", MEASURE_MB]), seconds=60)
    return int(result.stdout)

async def main():
    view, results = host_view.view_of(Path("/")), {}
    for name, hog in HOGS.items():
        sandbox = await RunningSandbox.start(SandboxSpec(disk_mb=64, memory_bytes=LIMIT << 20, pids=200), view)
        keep = f"{hog}; import time; time.sleep(500)"
        # In the background: no command runs while the memory is in use.
        start = "for i in {1..25}; do setsid python3 -c " + json.dumps(keep) + " >/dev/null 2>&1 & done"
        await sandbox.run(Command(["/bin/bash", "-c", start]), seconds=60)
        await asyncio.sleep(6)
        results[name] = [await used_mb(sandbox), sandbox.ended, len(sandbox.notes)]
        alive = await sandbox.run(Command(["/bin/echo", "alive"]), seconds=60)
        assert alive.stdout == b"alive\\n"
        await sandbox.stop()
    sandbox = await RunningSandbox.start(SandboxSpec(disk_mb=64, memory_bytes=LIMIT << 20, pids=60), view)
    # Bounded, so that a slow check on a busy machine does not take the machine down.
    flood = "for i in {1..300}; do sleep 500 & done"
    await sandbox.run(Command(["/bin/bash", "-c", f"({flood}) >/dev/null 2>&1 &"]), seconds=60)
    await asyncio.sleep(3)
    count = "n=0; for d in /proc/[0-9]*; do n=$((n+1)); done; echo $n"
    result = await sandbox.run(Command(["/bin/bash", "-c", count]), seconds=60)
    results["processes"] = [int(result.stdout), sandbox.ended, 0]
    await sandbox.stop()
    print(json.dumps(results))

LIMIT = int(sys.argv[1])
asyncio.run(main())
"""


WITHOUT_CGROUPS = ["unshare", "--mount", "sh", "-c", 'mount -t tmpfs none /sys/fs/cgroup && exec "$@"', "sh"]


@pytest.fixture(scope="module", params=["user", pytest.param("root", marks=pytest.mark.long)])
def measured(request: pytest.FixtureRequest) -> dict[str, tuple[int, bool, int]]:
    """Results by kind of memory: MB in use at the end, whether the sandbox ended, and the number of its notes."""
    command = [sys.executable, "-c", SCRIPT, str(LIMIT_MB)]
    environment: dict[str, str] = {"PATH": os.defpath}
    if os.geteuid() == 0:
        if shutil.which("setpriv") is None or shutil.which("unshare") is None:
            pytest.skip("setpriv and unshare (util-linux) are not installed")
        if request.param == "user":
            command, variables = as_nobody(command)
            environment |= variables
        else:
            command = [*WITHOUT_CGROUPS, *command]
            environment["PYTHONPATH"] = str(Path(__file__).parents[2] / "src")
    elif request.param == "root":
        pytest.skip("this is an ordinary user")
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, cwd="/")
    if "Operation not permitted" in result.stderr and "SandboxStartError" in result.stderr:
        pytest.skip(f"the kernel gives ordinary users no namespaces: {result.stderr.strip().splitlines()[-1]}")
    assert result.returncode == 0, result.stdout + result.stderr
    return {name: tuple(values) for name, values in json.loads(result.stdout.splitlines()[-1]).items()}


MEMORY_KINDS = ["private", "shared", "shared with dropped pages", "System V segment", "tmpfs file", "memfd"]


@pytest.mark.parametrize("kind", MEMORY_KINDS)
def test_memory_stays_below_limit(measured, kind):
    used_mb, ended, _ = measured[kind]
    assert used_mb <= LIMIT_MB + 20  # for the Python process that measures
    assert not ended


@pytest.mark.parametrize("kind", MEMORY_KINDS[:4])
def test_reports_killed_process(measured, kind):
    assert measured[kind][2] > 0


def test_processes_stay_below_limit(measured):
    assert measured["processes"][0] <= 60 + 5
