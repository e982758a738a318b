"""Changed files and tampered tools of real containers."""

import os
from collections.abc import AsyncIterator
from pathlib import Path
from uuid import uuid4

import pytest
from fakes import make_task
from harbor.models.task.config import EnvironmentConfig
from harbor.models.trial.paths import TrialPaths
from tool_attacks import ATTACKS, DOCKERFILE, HONEST

from harbortrainer.harbor_compat.compose_override import ComposeCall
from harbortrainer.sandbox.containers.container_changes import ContainerChanges
from harbortrainer.sandbox.docker_environment import DockerSandbox
from harbortrainer.sandbox.errors_and_changes import ChangedFile, SandboxChanges

pytestmark = [
    pytest.mark.process,
    pytest.mark.docker,
    pytest.mark.usefixtures("container"),
    pytest.mark.skipif(os.geteuid() != 0, reason="only root reads the layers of containers"),
]


class ComposeOnlySandbox(DockerSandbox):
    """Docker sandbox that runs every command with Compose, as for a task with sidecars."""

    async def run_without_compose(self, call: ComposeCall) -> None:
        return None


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_task(tmp_path_factory.mktemp("attacked") / "task", dockerfile=f"{DOCKERFILE}VOLUME /home\n")


def make_environment(kind: type[DockerSandbox], task: Path, folder: Path) -> DockerSandbox:
    return kind(
        environment_dir=task / "environment",
        environment_name="attacked-tools",
        session_id=f"Attacked_{uuid4().hex[:12]}",
        trial_paths=TrialPaths(trial_dir=folder),
        task_env_config=EnvironmentConfig(),
    )


@pytest.fixture(params=[DockerSandbox])
async def attacked(request: pytest.FixtureRequest, task: Path, tmp_path: Path) -> AsyncIterator[DockerSandbox]:
    """A container in which the agent's part has started."""
    environment = make_environment(request.param, task, tmp_path)
    try:
        await environment.start(force_build=False)
        await environment.exec("echo > /usr/bin/before; echo > /etc/ld.so.preload; rm /etc/ld.so.preload")
        await environment.restore_limits()
        yield environment
    finally:
        await environment.stop(delete=True)


async def changes(environment: DockerSandbox) -> SandboxChanges:
    changed = await environment.changes()
    assert changed is not None
    return changed


@pytest.mark.parametrize("command", ATTACKS)
async def test_names_attack_in_container(attacked: DockerSandbox, command: str):
    done = await attacked.exec(command)
    assert any(ATTACKS[command] in tool for tool in (await changes(attacked)).tools), done


async def test_honest_work_in_container_is_not_named(attacked: DockerSandbox):
    for command in HONEST:
        await attacked.exec(command)
        assert (await changes(attacked)).tools == [], command


@pytest.mark.parametrize("attacked", [DockerSandbox, ComposeOnlySandbox], indirect=True)
async def test_lists_changed_files_of_container(attacked: DockerSandbox):
    await attacked.exec("echo 1234 > /app/new; rm /usr/bin/zz-tool; mkdir /app/empty; echo 1 > /etc/hostname")
    changed = await changes(attacked)
    assert sorted(changed.files, key=lambda file: file.path) == [
        ChangedFile("/app/new", "added", 5, None, "1234\n"),
        ChangedFile("/usr/bin/zz-tool", "removed", 0),
    ]
    assert (changed.total, changed.tools) == (2, ["the program /usr/bin/zz-tool was removed"])


async def test_names_program_with_its_old_size_and_time(attacked: DockerSandbox):
    """`docker diff` would not list it."""
    await attacked.exec(
        "cp -p /usr/bin/env /e; printf x | dd of=/usr/bin/env bs=1 seek=200 conv=notrunc; touch -r /e /usr/bin/env"
    )
    assert (await changes(attacked)).tools == ["the program /usr/bin/env was changed"]


async def test_changes_of_a_removed_container_are_unknown(attacked: DockerSandbox):
    container = attacked._direct.container
    assert container is not None
    await container.remove()
    assert await attacked.changes() is None


def test_changes_are_unknown_for_another_storage_driver(tmp_path: Path):
    details = {"GraphDriver": {"Name": "btrfs", "Data": {"UpperDir": str(tmp_path)}}}
    assert ContainerChanges.start(details, tmp_path) is None
