"""Background removal of containers: `stop` waits for their processes, not for the daemon. Uses real containers."""

import asyncio
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from test_direct_docker import make_environment

from harbortrainer.runs.label import RUN_LABEL, RUN_VARIABLE
from harbortrainer.sandbox.containers import container_exit, daemon_client
from harbortrainer.sandbox.docker_environment import DockerSandbox
from harbortrainer.sandbox.docker_examination import docker

pytestmark = [pytest.mark.docker, pytest.mark.usefixtures("container")]

PLAIN = "FROM debian:12-slim\n"
_START_BACKGROUND_WRITER = (
    "setsid bash -c 'while :; do echo more >> /logs/agent/output; sleep 0.01; done' >/dev/null 2>&1 & "
    "until [ -s /logs/agent/output ]; do sleep 0.05; done"
)


async def container_ids(sandbox: DockerSandbox) -> list[str]:
    """Return the ids of the trial's containers, running or not."""
    return (await docker("ps", "-aq", "--filter", f"label=harbortrainer.trial={sandbox.session_id}")).out.split()


@pytest.fixture
def slow_removal(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Kill containers at once, but remove them only after the event is set."""
    removal_allowed, remove = threading.Event(), container_exit._remove

    async def kill_and_wait(container: str, *, volumes: bool) -> None:
        await docker("kill", container)
        await asyncio.to_thread(removal_allowed.wait, 60.0)
        await remove(container, volumes=volumes)

    monkeypatch.setattr(container_exit, "_remove", kill_and_wait)
    return removal_allowed


async def test_stop_waits_for_processes_and_not_for_removal(tmp_path: Path, slow_removal: threading.Event):
    sandbox = make_environment(DockerSandbox, tmp_path, PLAIN)
    await sandbox.start(force_build=False)
    await sandbox.exec(_START_BACKGROUND_WRITER)
    log_file = tmp_path / "DockerSandbox" / "logs" / "output"
    await sandbox.stop(delete=True)
    try:
        assert await container_ids(sandbox), "stop waited for the daemon"
        size_before = log_file.stat().st_size
        await asyncio.sleep(0.5)
        assert log_file.stat().st_size == size_before
    finally:
        slow_removal.set()
    await container_exit.wait_removed()
    assert await container_ids(sandbox) == []


async def test_same_trial_can_restart_before_removal_ends(tmp_path: Path, slow_removal: threading.Event):
    first = make_environment(DockerSandbox, tmp_path / "first", PLAIN)
    second = make_environment(DockerSandbox, tmp_path / "second", PLAIN)
    second.session_id = first.session_id
    await first.start(force_build=False)
    await first.stop(delete=True)
    starting = asyncio.create_task(second.start(force_build=False))
    asyncio.get_running_loop().call_later(1.0, slow_removal.set)
    await starting
    assert len(await container_ids(second)) == 1
    await second.stop(delete=True)
    await container_exit.wait_removed()
    assert await container_ids(first) == []


async def test_waits_for_removal_if_process_is_on_another_machine(tmp_path: Path):
    sandbox = make_environment(DockerSandbox, tmp_path, PLAIN)
    await sandbox.start(force_build=False)
    (container,) = (await docker("ps", "-q", "--no-trunc", "--filter", f"name={sandbox.project}")).out.split()
    # A process id of this machine that is not the container's, as with a remote daemon.
    await container_exit.kill_and_remove(container, sandbox.project, os.getpid(), volumes=True)
    assert await container_ids(sandbox) == []
    await sandbox.stop(delete=True)


async def test_unreachable_daemon_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    async def unreachable() -> None:
        return None

    sandbox = make_environment(DockerSandbox, tmp_path, PLAIN)
    await sandbox.start(force_build=False)
    container = sandbox._direct.container
    assert container is not None
    with monkeypatch.context() as patch:
        patch.setattr(daemon_client, "open_client", unreachable)
        with pytest.raises(ConnectionError, match="does not answer"):
            await container.kill_and_remove(volumes=True)
    await sandbox.stop(delete=True)
    await container_exit.wait_removed()
    assert await container_ids(sandbox) == []


_START_AND_STOP_SCRIPT = """
import asyncio, sys
from pathlib import Path
from test_container_exit import PLAIN, docker
from test_direct_docker import make_environment
from harbortrainer.sandbox.containers import container_exit
from harbortrainer.sandbox.docker_environment import DockerSandbox

remove = container_exit._remove
async def remove_later(container, *, volumes):
    await docker("kill", container)
    await asyncio.sleep(1.5)
    await remove(container, volumes=volumes)
container_exit._remove = remove_later

async def main():
    sandbox = make_environment(DockerSandbox, Path(sys.argv[1]), PLAIN)
    await sandbox.start(force_build=False)
    await sandbox.stop(delete=True)
    print("stopped with", len(container_exit._pending), "to remove")

asyncio.run(main())
"""


def test_process_exit_waits_for_removals(tmp_path: Path):
    paths = os.pathsep.join(sys.path)
    run_id = f"test-{tmp_path.name}-{os.getpid()}"
    result = subprocess.run(
        [sys.executable, "-c", _START_AND_STOP_SCRIPT, str(tmp_path)],
        env=os.environ | {"PYTHONPATH": paths, RUN_VARIABLE: run_id},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert result.stdout == "stopped with 1 to remove\n", result.stderr
    containers = subprocess.run(
        ["docker", "ps", "-aq", "--filter", f"label={RUN_LABEL}={run_id}"], capture_output=True, text=True, check=True
    )
    assert containers.stdout == ""
