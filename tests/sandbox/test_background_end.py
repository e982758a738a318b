"""The end of a container does not wait for the daemon, and waits for all that runs inside. Real containers."""

import asyncio
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from test_without_compose import environment

from harbortrainer.runs.label import RUN_LABEL, RUN_VARIABLE
from harbortrainer.sandbox.containers import background_end, daemon_client
from harbortrainer.sandbox.docker_examination import docker
from harbortrainer.sandbox.labelled_docker import LabelledDocker

pytestmark = [pytest.mark.docker, pytest.mark.usefixtures("container")]

PLAIN = "FROM debian:12-slim\n"
_WRITES_ON = (
    "setsid bash -c 'while :; do echo more >> /logs/agent/now; sleep 0.01; done' >/dev/null 2>&1 & "
    "until [ -s /logs/agent/now ]; do sleep 0.05; done"
)


async def left(box: LabelledDocker) -> list[str]:
    """The ids of its containers, running or not."""
    return (await docker("ps", "-aq", "--filter", f"label=harbortrainer.trial={box.session_id}")).out.split()


@pytest.fixture
def slow_removal(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """A daemon that kills at once and removes when the event is set."""
    go_on, remove = threading.Event(), background_end._remove

    async def kill_and_wait(container: str, *, volumes: bool) -> None:
        await docker("kill", container)
        await asyncio.to_thread(go_on.wait, 60.0)
        await remove(container, volumes=volumes)

    monkeypatch.setattr(background_end, "_remove", kill_and_wait)
    return go_on


async def test_nothing_writes_any_more_though_the_daemon_is_not_waited_for(
    tmp_path: Path, slow_removal: threading.Event
):
    box = environment(LabelledDocker, tmp_path, PLAIN)
    await box.start(force_build=False)
    await box.exec(_WRITES_ON)
    written = tmp_path / "LabelledDocker" / "logs" / "now"
    await box.stop(delete=True)
    try:
        assert await left(box), "the daemon was waited for"
        before = written.stat().st_size
        await asyncio.sleep(0.5)
        assert written.stat().st_size == before
    finally:
        slow_removal.set()
    await background_end.finished()
    assert await left(box) == []


async def test_the_same_trial_can_begin_again_at_once(tmp_path: Path, slow_removal: threading.Event):
    first = environment(LabelledDocker, tmp_path / "first", PLAIN)
    again = environment(LabelledDocker, tmp_path / "second", PLAIN)
    again.session_id = first.session_id
    await first.start(force_build=False)
    await first.stop(delete=True)
    starting = asyncio.create_task(again.start(force_build=False))
    asyncio.get_running_loop().call_later(1.0, slow_removal.set)
    await starting
    assert len(await left(again)) == 1
    await again.stop(delete=True)
    await background_end.finished()
    assert await left(first) == []


async def test_where_the_kernel_tells_nothing_the_removal_is_waited_for(tmp_path: Path):
    box = environment(LabelledDocker, tmp_path, PLAIN)
    await box.start(force_build=False)
    (container,) = (await docker("ps", "-q", "--no-trunc", "--filter", f"name={box.project}")).out.split()
    await background_end.end(container, box.project, os.getpid(), volumes=True)  # as of a daemon elsewhere
    assert await left(box) == []
    await box.stop(delete=True)


async def test_a_daemon_that_does_not_answer_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    async def nobody() -> None:
        return None

    box = environment(LabelledDocker, tmp_path, PLAIN)
    await box.start(force_build=False)
    container = box._direct.container
    assert container is not None
    with monkeypatch.context() as gone:
        gone.setattr(daemon_client, "open_client", nobody)
        with pytest.raises(ConnectionError, match="does not answer"):
            await container.end(volumes=True)
    await box.stop(delete=True)
    await background_end.finished()
    assert await left(box) == []


_A_PROCESS = """
import asyncio, sys
from pathlib import Path
from test_background_end import PLAIN, docker
from test_without_compose import environment
from harbortrainer.sandbox.containers import background_end
from harbortrainer.sandbox.labelled_docker import LabelledDocker

remove = background_end._remove
async def later(container, *, volumes):
    await docker("kill", container)
    await asyncio.sleep(1.5)
    await remove(container, volumes=volumes)
background_end._remove = later

async def main():
    box = environment(LabelledDocker, Path(sys.argv[1]), PLAIN)
    await box.start(force_build=False)
    await box.stop(delete=True)
    print("stopped with", len(background_end._pending), "to remove")

asyncio.run(main())
"""


def test_a_process_that_ends_leaves_nothing(tmp_path: Path):
    paths = os.pathsep.join(sys.path)
    run = f"test-{tmp_path.name}-{os.getpid()}"
    said = subprocess.run(
        [sys.executable, "-c", _A_PROCESS, str(tmp_path)],
        env=os.environ | {"PYTHONPATH": paths, RUN_VARIABLE: run},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert said.stdout == "stopped with 1 to remove\n", said.stderr
    listed = subprocess.run(
        ["docker", "ps", "-aq", "--filter", f"label={RUN_LABEL}={run}"], capture_output=True, text=True, check=True
    )
    assert listed.stdout == ""
