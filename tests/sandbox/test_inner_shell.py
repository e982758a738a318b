"""The shell that runs a container's commands: what is done to it, and what it must not do. Real containers."""

import asyncio
from pathlib import Path

import pytest
from test_without_compose import environment

from harbortrainer.sandbox.containers.exec_words import ServiceCommand
from harbortrainer.sandbox.containers.inner_shell import can_run
from harbortrainer.sandbox.labelled_docker import LabelledDocker

pytestmark = [pytest.mark.docker, pytest.mark.usefixtures("container")]

IMAGE = "FROM debian:12-slim\nRUN useradd -m worker\nWORKDIR /app\n"


@pytest.fixture
async def box(tmp_path: Path):
    """A container that runs."""
    made = environment(LabelledDocker, tmp_path, IMAGE)
    await made.start(force_build=False)
    yield made
    await made.stop(delete=True)


async def said(box: LabelledDocker, command: str, **how) -> str:
    return (await box.exec(command, **how)).stdout or ""


async def test_one_shell_runs_command_after_command(box: LabelledDocker):
    parents = {await said(box, "echo $PPID") for _ in range(5)}
    assert len(parents) == 1


async def test_commands_at_the_same_time_do_not_wait_for_each_other(box: LabelledDocker):
    waits = asyncio.create_task(box.exec("while [ ! -e /tmp/go ]; do sleep 0.05; done; echo went"))
    assert await said(box, "sleep 0.2; touch /tmp/go; echo sent") == "sent\n"
    assert (await waits).stdout == "went\n"


async def test_what_is_left_running_says_nothing_in_later_commands(box: LabelledDocker):
    assert "first\n" in await said(box, "(while :; do echo noise; sleep 0.05; done) & echo first")
    for _ in range(3):
        assert await said(box, "sleep 0.2; echo quiet") == "quiet\n"
    assert await said(box, "ls /proc/*/exe > /dev/null 2>&1; pgrep -c sleep >/dev/null && echo alive") == "alive\n"


@pytest.mark.parametrize("killed", ["pkill -9 -f harbortrainer-ready", "kill -9 $PPID", "kill 0; sleep 5"])
async def test_a_shell_that_was_killed_is_replaced(box: LabelledDocker, killed: str):
    ended = await box.exec(f"echo before; {killed}; sleep 0.2; echo after")
    assert (ended.stdout or "").startswith("before\n")
    assert ended.return_code in (0, 137, 143)
    assert await said(box, "echo again") == "again\n"


async def test_a_shell_that_was_killed_while_it_was_idle_loses_no_command(box: LabelledDocker):
    await box.exec("echo $$ > /tmp/x; (sleep 0.3; pkill -9 -f harbortrainer-ready) >/dev/null 2>&1 & true")
    await asyncio.sleep(1.0)
    assert await said(box, "echo x >> /tmp/count; wc -l < /tmp/count") == "1\n"


async def test_a_command_that_takes_too_long_goes_on_as_in_harbors_docker(box: LabelledDocker):
    with pytest.raises(RuntimeError, match="timed out"):
        await box.exec("sleep 1.5; touch /tmp/late", timeout_sec=1)
    assert await said(box, "echo next") == "next\n"
    waits = "for i in {1..200}; do [ -e /tmp/late ] && break; sleep 0.1; done; ls /tmp/late"
    assert await said(box, waits) == "/tmp/late\n"


async def test_a_command_that_was_cancelled_harms_no_other(box: LabelledDocker):
    cancelled = asyncio.create_task(box.exec("sleep 0.5; echo late"))
    await asyncio.sleep(0.2)
    cancelled.cancel()
    with pytest.raises(asyncio.CancelledError):
        await cancelled
    assert await said(box, "sleep 0.5; echo mine") == "mine\n"


async def test_each_user_has_a_shell_of_their_own(box: LabelledDocker):
    who = [await said(box, "id -un; id -un $(stat -c %u /proc/$PPID); pwd", user=user) for user in (None, "worker", 0)]
    assert who == ["root\nroot\n/app\n", "worker\nworker\n/app\n", "root\nroot\n/app\n"]


async def test_grading_is_done_by_shells_that_the_agent_never_met(box: LabelledDocker):
    before = await said(box, "echo $PPID")
    await box.make_room()
    during = await said(box, "echo $PPID")
    await box.room_is_over()
    assert len({before, during, await said(box, "echo $PPID")}) == 3


async def test_a_folder_that_was_made_again_is_entered_again(box: LabelledDocker):
    await box.exec("cd /; rm -rf /app; mkdir /app; touch /app/new")
    assert await said(box, "ls") == "new\n"


async def test_without_bash_a_command_fails_as_it_does_in_harbors_docker(box: LabelledDocker):
    await box.exec("rm /bin/bash /usr/bin/bash")
    first = await box.exec("echo 1")
    await box.make_room()
    assert {first.return_code, (await box.exec("echo 1")).return_code} <= {126, 127}


@pytest.mark.parametrize(
    ("command", "can"),
    [
        (ServiceCommand(["bash", "-c", "x"], env={"A": "1", "BASHFUL": "2"}), False),
        (ServiceCommand(["bash", "-c", "x"], env={"A_1": "\n"}), True),
        (ServiceCommand(["bash", "-c", "x"], env={"1A": "1"}), False),
        (ServiceCommand(["bash", "-c", "x\0"]), False),
        (ServiceCommand(["bash", "-c", "x"], env={"PWD": "/"}), False),
    ],
)
def test_what_bash_would_change_is_not_asked_of_it(command: ServiceCommand, can: bool):
    assert can_run(command) == can
