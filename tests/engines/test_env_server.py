"""The environment server's process: sharing, access, priority, errors, and its end with the parent process."""

import asyncio
import os
import subprocess
import sys
import textwrap
import time
from contextlib import suppress
from http import HTTPStatus
from pathlib import Path

import httpx
import psutil
import pytest
from autogroups import can_raise_priority, group_of
from leftovers import remaining_processes
from ordinary_user import as_nobody
from patience import wait_until
from verifiers.v1.serve import EnvClient

from harbortrainer.config.orchestrator_config import OrchestratorConfig
from harbortrainer.engines import env_server
from harbortrainer.engines.env_server import EnvServer, keep_serving, plan_servers, server_key
from harbortrainer.engines.env_server.remote_server import RemoteServer, ServerLostError
from harbortrainer.errors import RunStoppedError, UserError
from harbortrainer.runs.folder import RunFolder

STATIC = {"pool": {"type": "static", "num_workers": 1}}
TWO = {"pool": {"type": "static", "num_workers": 2}}


def env(tasks: str, **harness) -> dict:
    return {"taskset": {"id": "harbor_env", "tasks_dir": tasks}, "agent": {"harness": {"id": "harbor_env", **harness}}}


def config(*sources: dict) -> OrchestratorConfig:
    train = [{"env": source, "serve": STATIC, "name": str(i)} for i, source in enumerate(sources)]
    return OrchestratorConfig.model_validate({"train": {"source": train}})


def test_sources_with_other_tasks_share_server(tmp_path):
    run = RunFolder(tmp_path)
    sources = config(env("a"), env("b"), env("a", keep_trials="all")).train.source
    assert len(plan_servers(sources, run, {})) == 2


def test_other_plugins_do_not_share_server():
    first, second = config(*({"taskset": {"id": "gsm8k", "split": split}} for split in ("train", "test"))).train.source
    assert server_key(first) != server_key(second)


def test_refuses_rollout_details(tmp_path):
    sources = config(env("a", capture="rollout_details", vllm_base_url="http://localhost:1/v1")).train.source
    with pytest.raises(UserError, match="capture"):
        plan_servers(sources, RunFolder(tmp_path), {})


def test_server_load_error_has_cause(tmp_path):
    server = EnvServer("s", {"taskset": {"id": "no_such_module"}}, STATIC, log=tmp_path / "log", variables={})
    server.start()
    with pytest.raises(RunStoppedError, match=r"exited: .*no_such_module"):
        server.address()
    server.stop()


def test_server_ends_with_parent(tmp_path):
    parent = textwrap.dedent(f"""
        import os, signal
        from pathlib import Path
        from harbortrainer.engines.env_server import EnvServer
        server = EnvServer("s", {env(str(tmp_path))!r}, {STATIC!r}, log=Path({str(tmp_path / "log")!r}), variables={{}})
        server.start()
        print(server.address(), server.process.pid, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    """)
    done = subprocess.run([sys.executable, "-c", parent], capture_output=True, text=True, check=False)
    address, pid = done.stdout.split()
    assert address.startswith("ipc://")
    with suppress(psutil.NoSuchProcess):
        assert remaining_processes([psutil.Process(int(pid))]) == []
    wait_until(lambda: not Path(address.removeprefix("ipc://")).parent.exists())


CONNECT = "import socket, sys; socket.socket(socket.AF_UNIX).connect(sys.argv[1])"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_other_users_cannot_reach_server(tmp_path):
    server = EnvServer("s", env(str(tmp_path)), STATIC, log=tmp_path / "log", variables={})
    server.start()
    path = server.address().removeprefix("ipc://")
    assert server.process is not None
    process = psutil.Process(server.process.pid)

    def listening_ports() -> list[int]:
        return [found.laddr.port for found in process.net_connections("inet") if found.status == "LISTEN"]

    wait_until(listening_ports)
    (port,) = listening_ports()  # of the interception server, which requires a rollout's key
    for headers in ({}, {"Authorization": "Bearer EMPTY"}):
        reply = httpx.post(f"http://127.0.0.1:{port}/v1/chat/completions", headers=headers, json={}, trust_env=False)
        assert reply.status_code == HTTPStatus.UNAUTHORIZED
    command = [sys.executable, "-c", CONNECT, path]
    as_owner = subprocess.run(command, capture_output=True, text=True, check=False)
    command_as_nobody, variables = as_nobody(command)
    as_other = subprocess.run(
        command_as_nobody, env=os.environ | variables, capture_output=True, text=True, check=False, cwd="/"
    )
    server.stop()
    assert as_owner.returncode == 0, as_owner.stderr
    assert as_other.stderr.strip().endswith("PermissionError: [Errno 13] Permission denied")
    assert not Path(path).parent.exists()


@pytest.mark.skipif(not can_raise_priority(), reason="only root may (CAP_SYS_NICE), and on a kernel with autogroups")
def test_server_session_has_priority_over_sandboxes(tmp_path):
    before = group_of(os.getpid())
    server = EnvServer("s", env(str(tmp_path)), TWO, log=tmp_path / "log", variables={})
    server.start()
    server.address()
    assert server.process is not None
    groups = [group_of(pid) for pid in (server.process.pid, *(p.pid for p in workers_of(server.process.pid)))]
    server.stop()
    assert len(set(groups)) == 1 and groups[0].endswith("nice -10"), groups
    assert group_of(os.getpid()) == before != groups[0], "the parent's session is unchanged"


def workers_of(server: int) -> list[psutil.Process]:
    deadline, workers = time.monotonic() + 60, []
    while len(workers) < 2 and time.monotonic() < deadline:
        workers = psutil.Process(server).children(recursive=True)
        time.sleep(0.1)
    assert len(workers) >= 2
    return workers


def test_kills_slow_server_with_workers(tmp_path):
    server = EnvServer("s", env(str(tmp_path)), TWO, log=tmp_path / "log", variables={})
    server.start()
    server.address()
    assert server.process is not None
    workers = workers_of(server.process.pid)
    for process in (psutil.Process(server.process.pid), *workers):
        process.suspend()  # simulates a hang
    server.stop(within=0.2)
    assert remaining_processes(workers) == []


async def test_server_without_one_of_its_workers_is_started_again(tmp_path, monkeypatch: pytest.MonkeyPatch):
    """A request in flight is lost at once, and a new one reaches the new server at the same address."""
    monkeypatch.setattr(env_server, "RESTART_PAUSES_S", (0.1, 0.1))
    server = EnvServer("s", env(str(tmp_path)), TWO, log=tmp_path / "log", variables={})
    server.start()
    address, owner = await asyncio.to_thread(server.address), server.owner
    ended, reported = list[str](), list[str]()

    def end_sandboxes(owner: str) -> list[str]:
        ended.append(owner)
        return ["ended"]

    client = EnvClient(address=address)
    await client.wait_for_server_startup(timeout=60, interval=0.2)
    guard = RemoteServer("s", client, may_be_silent=True)
    keeping = asyncio.create_task(keep_serving(server, end_sandboxes, reported.append))
    assert server.process is not None
    old, worker = server.process.pid, (await asyncio.to_thread(workers_of, server.process.pid))[-1]
    unanswered = asyncio.create_task(guard.guard(asyncio.sleep(600)))
    await asyncio.sleep(1.5)  # the server has seen its workers
    worker.kill()
    with pytest.raises(ServerLostError):
        await asyncio.wait_for(unanswered, 60)
    await client.wait_for_server_startup(timeout=60, interval=0.2)
    assert (server.restarts, server.process.pid != old, server.owner != owner) == (1, True, True)
    assert ended == [owner] and reported[1] == "ended"
    assert reported[0].startswith(f"the environment server of 's' exited: worker {worker.pid} ended with exit code -9")
    assert reported[0].endswith("; starting it again in 0 s")
    keeping.cancel()
    await guard.close()
    await client.close()
    await asyncio.to_thread(server.stop)


async def test_server_that_keeps_ending_ends_the_run(tmp_path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(env_server, "RESTART_PAUSES_S", (0.0,))
    server = EnvServer("s", {"taskset": {"id": "no_such_module"}}, STATIC, log=tmp_path / "log", variables={})
    server.start()
    server.serving = True  # as if it had served before
    with pytest.raises(RunStoppedError, match="the environment server of 's' exited"):
        await asyncio.wait_for(keep_serving(server, lambda owner: [], lambda line: None), 120)
    assert server.restarts == 1
    server.stop()
