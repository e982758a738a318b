"""Reusable shell for a container's commands: isolation of commands, and recovery. Uses real containers."""

import asyncio
from pathlib import Path

import pytest
from test_direct_docker import make_environment

from harbortrainer.sandbox.containers.shell import ServiceCommand, can_run
from harbortrainer.sandbox.docker_environment import DockerSandbox

pytestmark = [pytest.mark.process, pytest.mark.docker, pytest.mark.usefixtures("container")]

IMAGE = "FROM debian:12-slim\nRUN useradd -m worker\nWORKDIR /app\n"


@pytest.fixture
async def docker_sandbox(tmp_path: Path):
    """A running container."""
    started = make_environment(DockerSandbox, tmp_path, IMAGE)
    await started.start(force_build=False)
    yield started
    await started.stop(delete=True)


async def output(sandbox: DockerSandbox, command: str, **options) -> str:
    return (await sandbox.exec(command, **options)).stdout or ""


async def test_one_shell_runs_all_commands(docker_sandbox: DockerSandbox):
    parents = {await output(docker_sandbox, "echo $PPID") for _ in range(5)}
    assert len(parents) == 1


async def test_concurrent_commands_do_not_block_each_other(docker_sandbox: DockerSandbox):
    waiting = asyncio.create_task(docker_sandbox.exec("while [ ! -e /tmp/go ]; do sleep 0.05; done; echo done"))
    assert await output(docker_sandbox, "sleep 0.2; touch /tmp/go; echo sent") == "sent\n"
    assert (await waiting).stdout == "done\n"


async def test_background_output_is_not_in_later_commands(docker_sandbox: DockerSandbox):
    assert "first\n" in await output(docker_sandbox, "(while :; do echo noise; sleep 0.05; done) & echo first")
    for _ in range(3):
        assert await output(docker_sandbox, "sleep 0.2; echo quiet") == "quiet\n"
    check_alive = "ls /proc/*/exe > /dev/null 2>&1; pgrep -c sleep >/dev/null && echo alive"
    assert await output(docker_sandbox, check_alive) == "alive\n"


@pytest.mark.parametrize("kill_command", ["pkill -9 -f harbortrainer-ready", "kill -9 $PPID", "kill 0; sleep 5"])
async def test_killed_shell_is_replaced(docker_sandbox: DockerSandbox, kill_command: str):
    result = await docker_sandbox.exec(f"echo before; {kill_command}; sleep 0.2; echo after")
    assert (result.stdout or "").startswith("before\n")
    assert result.return_code in (0, 137, 143)
    assert await output(docker_sandbox, "echo again") == "again\n"


async def test_shell_killed_while_idle_loses_no_command(docker_sandbox: DockerSandbox):
    await docker_sandbox.exec("echo $$ > /tmp/x; (sleep 0.3; pkill -9 -f harbortrainer-ready) >/dev/null 2>&1 & true")
    await asyncio.sleep(1.0)
    assert await output(docker_sandbox, "echo x >> /tmp/count; wc -l < /tmp/count") == "1\n"


async def test_timed_out_command_continues_as_in_harbor(docker_sandbox: DockerSandbox):
    with pytest.raises(RuntimeError, match="timed out"):
        await docker_sandbox.exec("sleep 1.5; touch /tmp/late", timeout_sec=1)
    assert await output(docker_sandbox, "echo next") == "next\n"
    wait = "for i in {1..200}; do [ -e /tmp/late ] && break; sleep 0.1; done; ls /tmp/late"
    assert await output(docker_sandbox, wait) == "/tmp/late\n"


async def test_cancelled_command_does_not_affect_others(docker_sandbox: DockerSandbox):
    cancelled = asyncio.create_task(docker_sandbox.exec("sleep 0.5; echo first"))
    await asyncio.sleep(0.2)
    cancelled.cancel()
    with pytest.raises(asyncio.CancelledError):
        await cancelled
    assert await output(docker_sandbox, "sleep 0.5; echo second") == "second\n"


async def test_each_user_has_own_shell(docker_sandbox: DockerSandbox):
    show_users = "id -un; id -un $(stat -c %u /proc/$PPID); pwd"
    users = [await output(docker_sandbox, show_users, user=user) for user in (None, "worker", 0)]
    assert users == ["root\nroot\n/app\n", "worker\nworker\n/app\n", "root\nroot\n/app\n"]


async def test_grading_uses_new_shells(docker_sandbox: DockerSandbox):
    before = await output(docker_sandbox, "echo $PPID")
    await docker_sandbox.raise_limits()
    during = await output(docker_sandbox, "echo $PPID")
    await docker_sandbox.restore_limits()
    assert len({before, during, await output(docker_sandbox, "echo $PPID")}) == 3


async def test_recreated_working_folder_is_entered(docker_sandbox: DockerSandbox):
    await docker_sandbox.exec("cd /; rm -rf /app; mkdir /app; touch /app/new")
    assert await output(docker_sandbox, "ls") == "new\n"


async def test_command_without_bash_fails_as_in_harbor(docker_sandbox: DockerSandbox):
    await docker_sandbox.exec("rm /bin/bash /usr/bin/bash")
    first = await docker_sandbox.exec("echo 1")
    await docker_sandbox.raise_limits()
    assert {first.return_code, (await docker_sandbox.exec("echo 1")).return_code} <= {126, 127}


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        (ServiceCommand(["bash", "-c", "x"], env={"A": "1", "BASHX": "2"}), False),
        (ServiceCommand(["bash", "-c", "x"], env={"A_1": "\n"}), True),
        (ServiceCommand(["bash", "-c", "x"], env={"1A": "1"}), False),
        (ServiceCommand(["bash", "-c", "x\0"]), False),
        (ServiceCommand(["bash", "-c", "x"], env={"PWD": "/"}), False),
    ],
)
def test_can_run_rejects_input_that_bash_would_change(command: ServiceCommand, expected: bool):
    assert can_run(command) == expected
