"""A sandbox that exhausts what the kernel counts for a user leaves enough to other sandboxes, the host and grading.

One script, run as root and as an ordinary user, has two sandboxes. The first takes all that it gets.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from ordinary_user import as_nobody

pytestmark = pytest.mark.process

SCRIPT = r'''
import asyncio, ctypes, json, os, tempfile
from pathlib import Path
from harbor.models.task.config import EnvironmentConfig, NetworkMode, NetworkPolicy
from harbor.models.trial.paths import TrialPaths
from harbortrainer.sandbox.local import LocalEnvironment

TAKE = """
import ctypes, errno, itertools, os, sys, time
libc = ctypes.CDLL(None, use_errno=True)
def count(make):
    for number in itertools.count():
        if number == int(sys.argv[1]) or not make(number):
            return number
def terminal(number):
    try:
        return os.openpty()
    except OSError:
        return None
inotify = libc.inotify_init1(0)
def watch(number):
    os.mkdir(f"/tmp/w{number}")
    return libc.inotify_add_watch(inotify, f"/tmp/w{number}".encode(), 2) >= 0
print("watches", count(watch))
print("instances", 1 + count(lambda number: libc.inotify_init1(0) >= 0))
print("terminals", count(terminal))
number = {"x86_64": 248, "aarch64": 217}[os.uname().machine]
print("keys", libc.syscall(number, b"user", b"name", b"value", 5, -1) == -1 and errno.errorcode[ctypes.get_errno()])
print("namespaces", libc.unshare(0x10000000) == -1 and errno.errorcode[ctypes.get_errno()])
sys.stdout.flush()
os.close(1)
time.sleep(float(sys.argv[2]))
"""

async def make(top, name):
    (top / name / "environment").mkdir(parents=True)
    sandbox = LocalEnvironment(
        environment_dir=top / name / "environment", environment_name="t", session_id="t",
        trial_paths=TrialPaths(trial_dir=top / name), task_env_config=EnvironmentConfig(),
        network_policy=NetworkPolicy(network_mode=NetworkMode.NO_NETWORK), cache_dir=str(top / "cache"), image="host",
    )
    await sandbox.start(force_build=False)
    return sandbox

async def take(sandbox, most, seconds=0):
    """Take up to `most` of each, and hold them for `seconds` after the answer."""
    taker = f"setsid python3 -c '{TAKE}' {most} {seconds} > /tmp/taken 2>&1 < /dev/null"
    await sandbox.exec(f"{taker} & until grep -q namespaces /tmp/taken; do sleep 0.1; done", timeout_sec=120)
    answer = await sandbox.exec("cat /tmp/taken; rm -rf /tmp/*")
    return dict(line.split() for line in answer.stdout.splitlines())

def take_here():
    instance = ctypes.CDLL(None).inotify_init1(0)
    try:
        return [instance >= 0, len(os.openpty())]
    except OSError as error:
        return [instance >= 0, str(error)]

async def main(top):
    first, second = await make(top, "first"), await make(top, "second")
    try:
        found = {"first": await take(first, 10**6, 600), "second": await take(second, 16), "host": take_here()}
        await first.raise_limits()
        found["grading"] = await take(first, 8)
        print(json.dumps(found))
    finally:
        await first.stop(delete=True)
        await second.stop(delete=True)

with tempfile.TemporaryDirectory() as folder:
    asyncio.run(main(Path(folder)))
'''


def host_limit(name: str) -> int:
    return int(Path("/proc/sys/fs/inotify", name).read_text())


@pytest.mark.parametrize("user", ["root", "nobody"])
def test_exhausted_sandbox_leaves_enough_to_others(user: str) -> None:
    if os.geteuid() != 0:
        pytest.skip("plays as root and as another user")
    command, variables = [sys.executable, "-c", SCRIPT], dict(os.environ)
    if user == "nobody":
        command, variables = as_nobody(command)
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=300, cwd="/", check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    share = 2 if user == "root" else 4
    assert found["first"] == {
        "watches": str(min(host_limit("max_user_watches") // share, 10**6)),
        "instances": str(host_limit("max_user_instances") // share),
        "terminals": "128",
        "keys": "ENOSYS",
        "namespaces": "ENOSPC",
    }
    assert found["second"] == found["first"] | {"watches": "16", "instances": "17", "terminals": "16"}
    assert found["host"] == [True, 2]
    assert {name: found["grading"][name] for name in ("watches", "instances", "terminals")} == {
        "watches": "8",
        "instances": "9",
        "terminals": "8",
    }
