"""No leftovers of a sandbox after it stops, or after its parent, fork server or init process is killed."""

import asyncio
import os
import signal
import subprocess
import sys

import leftovers
import psutil
import pytest
from patience import HANG_S, wait_until

from harbortrainer.sandbox import fork_server_client
from harbortrainer.sandbox.errors_and_changes import SandboxDiedError

PARENT_SCRIPT = """
import asyncio, sys
from pathlib import Path
from harbortrainer.sandbox import host_view
from harbortrainer.sandbox.running_sandbox import RunningSandbox
from harbortrainer.sandbox.inside.messages import Command, SandboxSpec

async def main():
    sandboxes = [await RunningSandbox.start(SandboxSpec(), host_view.view_of(Path("/"))) for _ in range(3)]
    env = {"PATH": "/usr/local/bin:/usr/bin:/bin"}
    for sandbox in sandboxes:
        start = "tmux new -d 'sleep 1000'; sleep 1001 & disown"
        result = await sandbox.run(Command(["/bin/bash", "-c", start], env=env))
        assert result.code == 0, result.stderr
    busy = [asyncio.create_task(sandbox.run(Command(["/bin/sleep", "1002"], env=env))) for sandbox in sandboxes]
    await asyncio.sleep(0.1)
    print("ready", flush=True)
    await asyncio.gather(*busy)

asyncio.run(main())
"""


@pytest.fixture
def parent():
    process = subprocess.Popen([sys.executable, "-c", PARENT_SCRIPT], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    yield process
    process.kill()
    process.wait()


def test_killed_parent_leaves_nothing(parent):
    footprint = leftovers.footprint(parent.pid)
    names = [process.name() for process in footprint.processes]
    assert names.count("sleep") == 9
    assert any("tmux" in name for name in names)
    assert footprint.remains()
    parent.kill()
    parent.wait()
    assert footprint.wait_gone() == []


def test_killed_fork_server_leaves_nothing_after_parent_exit(parent):
    footprint = leftovers.footprint(parent.pid)
    fork_server = next(p for p in psutil.Process(parent.pid).children())
    fork_server.kill()
    parent.send_signal(signal.SIGTERM)
    parent.wait()
    assert footprint.wait_gone() == []


def test_ctrl_c_leaves_nothing(parent):
    footprint = leftovers.footprint(parent.pid)
    parent.send_signal(signal.SIGINT)
    parent.wait(timeout=300)  # a hang, not a slow machine
    assert footprint.wait_gone() == []


async def test_stopped_sandbox_leaves_only_fork_server(make_sandbox):
    sandbox = await make_sandbox()
    await sandbox.exec("tmux new -d 'sleep 1000'; setsid sleep 1003 & disown")
    before = leftovers.footprint(os.getpid())
    await sandbox.stop(delete=True)
    fork_server = psutil.Process(fork_server_client.shared().pid)
    before.processes.remove(fork_server)
    before.namespaces.discard(os.readlink(f"/proc/{fork_server.pid}/ns/mnt"))  # noqa: PTH115
    assert await asyncio.to_thread(before.wait_gone) == []


async def test_killed_init_process_raises_and_leaves_nothing(make_sandbox):
    sandbox = await make_sandbox()
    before = {p.pid for p in psutil.Process(fork_server_client.shared().pid).children(recursive=True)}
    running = asyncio.create_task(sandbox.exec("sleep 1004"))
    await asyncio.sleep(0.1)
    monitors = psutil.Process(fork_server_client.shared().pid).children()
    init_process = monitors[-1].children()[0]
    init_process.kill()
    with pytest.raises(SandboxDiedError):
        await running
    await sandbox.stop(delete=True)
    assert not any(psutil.pid_exists(pid) for pid in before if pid == init_process.pid)


async def test_next_sandbox_starts_after_fork_server_was_killed(make_sandbox):
    await make_sandbox()
    psutil.Process(fork_server_client.shared().pid).kill()
    sandbox = await make_sandbox()
    assert (await sandbox.exec("echo ok")).stdout == "ok\n"


async def test_killed_fork_server_is_replaced_before_its_exit_is_visible(make_sandbox, monkeypatch):
    await make_sandbox()
    fork_server = fork_server_client.shared()._process
    os.kill(fork_server.pid, signal.SIGKILL)
    first_polls, poll = iter([None, None]), fork_server.poll
    monkeypatch.setattr(fork_server, "poll", lambda: next(first_polls, 0) if fork_server.returncode is None else poll())
    assert (await (await make_sandbox()).exec("echo ok")).stdout == "ok\n"


async def test_cancelled_start_leaves_nothing(make_sandbox):
    sandboxes = [await make_sandbox(start=False) for _ in range(6)]
    results = []
    for steps, sandbox in enumerate(sandboxes):
        starting = asyncio.create_task(sandbox.start(force_build=False))
        await asyncio.sleep(0.001 * steps)
        starting.cancel()
        results += await asyncio.gather(starting, return_exceptions=True)
        await sandbox.stop(delete=True)
    assert any(isinstance(result, asyncio.CancelledError) for result in results)
    fork_server = psutil.Process(fork_server_client.shared().pid)
    await asyncio.to_thread(wait_until, lambda: all(map(leftovers.ended, fork_server.children())))


async def test_hanging_init_process_is_killed(make_sandbox):
    sandbox = await make_sandbox()
    monitor = psutil.Process(fork_server_client.shared().pid).children()[-1]
    init_process = monitor.children()[0]
    init_process.suspend()
    await asyncio.wait_for(sandbox.stop(delete=True), HANG_S)
    assert not psutil.pid_exists(init_process.pid)
