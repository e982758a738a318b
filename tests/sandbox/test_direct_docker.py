"""Containers that start without Compose behave like those that Compose starts. Uses real containers of both kinds."""

import asyncio
import json
import os
from pathlib import Path
from typing import Any

import pytest
from aiodocker import Docker
from aiodocker.exceptions import DockerError
from fakes import make_task
from harbor.models.task.config import EnvironmentConfig
from harbor.models.trial.paths import TrialPaths

from harbortrainer.harbor_compat.compose_override import ComposeCall
from harbortrainer.runs.label import RUN_LABEL, RUN_VARIABLE
from harbortrainer.sandbox.containers import container_exit, daemon_client, shell
from harbortrainer.sandbox.containers.direct_docker import UnsupportedComposeError, container_config, main_service
from harbortrainer.sandbox.docker_environment import DockerSandbox
from harbortrainer.sandbox.docker_examination import docker

DOCKERFILE = """FROM debian:12-slim
RUN useradd -m worker && mkdir -p /srv/work /srv/here && ln -s /srv/here /srv/link
ENV FROM_IMAGE="a b"
WORKDIR /srv/work
HEALTHCHECK --interval=1s CMD test -e /tmp/up
ENTRYPOINT ["sh", "-c", "touch /tmp/up; exec \\"$@\\"", "entry"]
"""
COMMANDS: dict[str, dict[str, Any]] = {
    "pwd": {},
    "echo out; exit 7": {},
    "echo err >&2": {},
    "printf 'no newline'": {},
    "pwd; id -un; echo $HOME; id -G": {"user": "worker", "cwd": "/tmp"},
    'echo "$FROM_IMAGE|$FROM_TASK|$FROM_CALL"': {"env": {"FROM_CALL": "x'y\"z\\ \t$HOME `id` é\nnext"}},
    "env | sort | grep -v '^HOSTNAME='": {"env": {"PATH": "/bin:/usr/bin", "BASH_ENV": "/none", "UID_": "5"}},
    "env | sort | grep -v '^HOSTNAME=' ": {"env": {"RANDOM": "5", "UID": "7", "with-dash": "1", "SHLVL": "9"}},
    "cat": {},
    "echo 'x\\'; $'": {},
    "kill -9 $$": {},
    "no-such-program": {},
    "id -un ": {"user": "no-such-user"},
    "echo $0 $# $-; ulimit -a; umask; cat /proc/self/oom_score_adj": {},
    "head -c 300000 /dev/zero | tr '\\0' x": {},
    "head -c 1000 /dev/urandom | sha256sum | wc -c; printf '\\377\\0\\001'": {},
    "cat /sys/fs/cgroup/memory/memory.limit_in_bytes /sys/fs/cgroup/memory.max 2>/dev/null": {},
    "grep -c . /etc/hosts; cat /mnt/data/file; touch /mnt/data/x 2>&1; test -w /logs/agent && echo w": {},
    "ps -o pid= -C sleep | wc -l; cat /proc/1/comm": {},
    "cat /srv/link/*.sh /srv/new/deep/*.sh /srv/work/*; stat -c '%a %n' /srv/new/deep/run.sh; ls -R /srv": {},
}

pytestmark = [pytest.mark.process, pytest.mark.docker, pytest.mark.usefixtures("container")]


class ComposeOnlySandbox(DockerSandbox):
    """Docker sandbox that runs every command with Compose, as for a task with sidecars."""

    async def run_without_compose(self, call: ComposeCall) -> None:
        return None


def make_environment(
    kind: type[DockerSandbox], folder: Path, dockerfile: str = DOCKERFILE, **options: Any
) -> DockerSandbox:
    """Return a sandbox that is not started, with its own files under `folder`."""
    if not (folder / "task").exists():
        make_task(folder / "task", dockerfile=dockerfile)
        (folder / "data").mkdir()
        (folder / "data" / "file").write_text("mounted\n")
    sandbox_folder = folder / kind.__name__
    (sandbox_folder / "logs").mkdir(parents=True)
    bind = {"type": "bind", "source": str(folder / "data"), "target": "/mnt/data", "read_only": True}
    return kind(
        environment_dir=folder / "task" / "environment",
        environment_name="compose-comparison",
        session_id=f"Compare_{folder.name}__{kind.__name__}",
        trial_paths=TrialPaths(trial_dir=sandbox_folder),
        task_env_config=EnvironmentConfig(memory_mb=300, cpus=1, env={"FROM_TASK": "1"}),
        mounts=[bind, {"type": "bind", "source": str(sandbox_folder / "logs"), "target": "/logs/agent"}],
        **options,
    )


async def run_all(sandbox: DockerSandbox, folder: Path) -> dict[str, tuple[int, str | None]]:
    """Upload files in every supported way, run each command and return its result."""
    (folder / "uploads" / "sub").mkdir(parents=True, exist_ok=True)
    (folder / "uploads" / "run.sh").write_text("#!/bin/sh\n")
    (folder / "uploads" / "run.sh").chmod(0o750)
    (folder / "uploads" / "sub" / "more").write_text("more\n")
    for target in ("/srv/link", "/srv/new/deep"):
        await sandbox.upload_dir(folder / "uploads", target)
    for target in ("/srv/work/", "/srv/work", "/srv/work/other.sh", "/srv/new/folder/for/it"):
        await sandbox.upload_file(folder / "uploads" / "run.sh", target)
    results = {}
    for command, options in COMMANDS.items():
        result = await sandbox.exec(command, **options)
        results[command] = (result.return_code, result.stdout)
    results["no folder"] = ((await sandbox.exec("true", cwd="/no/such/folder")).return_code, None)
    downloads = folder / type(sandbox).__name__ / "fetched"
    await sandbox.download_dir("/srv/link", downloads)
    results["fetched"] = (0, str(sorted(path.name for path in downloads.rglob("*"))))
    return results


async def test_commands_and_files_match_compose(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(RUN_VARIABLE, run_id := f"test-{tmp_path.name}")
    results = {}
    for kind in (DockerSandbox, ComposeOnlySandbox):
        sandbox = make_environment(kind, tmp_path)
        await sandbox.start(force_build=False)
        try:
            results[kind] = await run_all(sandbox, tmp_path)
            containers = await docker("ps", "-q", "--filter", f"label={RUN_LABEL}={run_id}")
            assert len(containers.out.split()) == 1
        finally:
            await sandbox.stop(delete=True)
        await container_exit.wait_removed()
        assert (await docker("ps", "-aq", "--filter", f"label={RUN_LABEL}={run_id}")).out == ""
    for command in (*COMMANDS, "no folder", "fetched"):
        assert results[DockerSandbox][command] == results[ComposeOnlySandbox][command], command


async def test_timeout_raises_harbors_error(tmp_path: Path):
    sandbox = make_environment(DockerSandbox, tmp_path)
    await sandbox.start(force_build=False)
    try:
        with pytest.raises(RuntimeError, match="Command timed out after 1 seconds"):
            await sandbox.exec("sleep 60", timeout_sec=1)
        assert (await sandbox.exec("echo still here")).stdout == "still here\n"
    finally:
        await sandbox.stop(delete=True)


async def test_startup_error_includes_container_output(tmp_path: Path):
    dockerfile = 'FROM debian:12-slim\nENTRYPOINT ["sh", "-c", "echo no database; exit 3"]\nHEALTHCHECK CMD false\n'
    sandbox = make_environment(DockerSandbox, tmp_path, dockerfile)
    try:
        with pytest.raises(RuntimeError, match="ended with code 3 during startup: no database"):
            await sandbox.start(force_build=False)
        assert (await docker("ps", "-aq", "--filter", f"label=harbortrainer.trial={sandbox.session_id}")).out == ""
    finally:
        await sandbox.stop(delete=True)


async def test_kept_container_is_stopped_and_not_removed(tmp_path: Path):
    sandbox = make_environment(DockerSandbox, tmp_path, "FROM debian:12-slim\n", keep_containers=True)
    await sandbox.start(force_build=False)
    await sandbox.exec("touch /new-file")
    await sandbox.stop(delete=True)
    (container_id,) = (
        await docker("ps", "-aq", "--filter", f"label=harbortrainer.trial={sandbox.session_id}")
    ).out.split()
    try:
        assert (await docker("inspect", "--format", "{{.State.Running}}", container_id)).out == "false\n"
        assert "A /new-file" in (await docker("diff", container_id)).out
    finally:
        await docker("rm", "-f", container_id)


async def test_removed_network_is_created_again(tmp_path: Path):
    for name in ("first", "second"):
        sandbox = make_environment(DockerSandbox, tmp_path / name, "FROM debian:12-slim\n")
        await sandbox.start(force_build=False)
        await sandbox.stop(delete=True)
        await container_exit.wait_removed()
        await docker("network", "rm", "harbortrainer-apart")  # refused while another test's container uses it


@pytest.mark.docker
async def test_container_needs_isolating_network(container: str, tmp_path: Path, monkeypatch):
    network_ids = iter(["0" * 64, None])  # first a removed network, then none that isolates

    async def ensure_network(client: Docker) -> str | None:
        return next(network_ids)

    monkeypatch.setattr(daemon_client, "_facts_by_address", {})
    monkeypatch.setattr(daemon_client, "ensure_network", ensure_network)
    sandbox = make_environment(DockerSandbox, tmp_path, "FROM debian:12-slim\n")
    with pytest.raises(RuntimeError, match="isolates containers from each other"):
        await sandbox.start(force_build=False)
    assert not (await docker("ps", "-aq", "--filter", f"name={sandbox.session_id}")).out.strip()


def write_compose_files(folder: Path, *services: dict) -> list[Path]:
    """Write compose files like Harbor's, one for each service dict; return their paths."""
    paths = [folder / f"{number}.json" for number in range(len(services))]
    for path, service in zip(paths, services, strict=True):
        path.write_text(json.dumps({"services": {"main": service}}))
    return paths


def test_container_config_translates_service(tmp_path: Path):
    bind = {"type": "bind", "source": "/a", "target": "/b", "read_only": True}
    labelled = {"type": "bind", "source": "/logs", "target": "/l", "bind": {"selinux": "z"}}
    service = main_service(
        write_compose_files(
            tmp_path,
            {"cpus": 2.0, "mem_limit": "512m"},
            {"environment": {"A": "1"}, "labels": {"x": "1"}},
            {"volumes": [bind, labelled]},
            {"init": True, "stop_grace_period": "0s", "labels": {"y": "2"}, "extra_hosts": ["h:host-gateway"]},
        )
    )
    assert container_config(service) == {
        "Cmd": ["sh", "-c", "sleep infinity"],
        "Env": ["A=1"],
        "Labels": {"x": "1", "y": "2"},
        "StopTimeout": 0,
        "HostConfig": {
            "NanoCpus": 2_000_000_000,
            "Memory": 512 << 20,
            "Mounts": [{"Type": "bind", "Source": "/a", "Target": "/b", "ReadOnly": True}],
            "Binds": ["/logs:/l:rw,z"],
            "Init": True,
            "ExtraHosts": ["h:host-gateway"],
        },
    }


@pytest.mark.parametrize(
    "service",
    [
        {"deploy": {"resources": {"reservations": {"devices": []}}}},
        {"ports": [{"target": 22}]},
        {"network_mode": "none"},
        {"environment": {"A": "${B}"}},
        {"volumes": [{"type": "volume", "source": "v", "target": "/v"}]},
        {"volumes": [{"type": "bind", "source": "./here", "target": "/v"}]},
        {"volumes": [{"type": "bind", "source": "/a:b", "target": "/v", "bind": {"selinux": "z"}}]},
        {"volumes": [{"type": "bind", "source": "/a", "target": "/v", "bind": {"create_host_path": False}}]},
    ],
    ids=lambda service: next(iter(service)),
)
def test_unknown_settings_are_left_to_compose(tmp_path: Path, service: dict):
    with pytest.raises(UnsupportedComposeError):
        container_config(main_service(write_compose_files(tmp_path, {"init": True}, service)))


def test_sidecars_are_left_to_compose(tmp_path: Path):
    path = tmp_path / "more.json"
    path.write_text(json.dumps({"services": {"main": {}, "database": {}}}))
    with pytest.raises(UnsupportedComposeError):
        main_service([path])


def test_unknown_arguments_are_left_to_compose():
    assert shell.parse_exec(["exec", "--index", "2", "main", "true"]) is None
    assert shell.parse_exec(["exec", "database", "sh", "-c", "true"]) is None
    assert shell.parse_upload(["cp", "main:/a", "b"]) is None
    parsed = shell.parse_exec(["exec", "-T", "-w", "/a", "-e", "B=c=d", "-u", "0", "main", "bash", "-c", "x"])
    assert parsed == shell.ServiceCommand(["bash", "-c", "x"], "/a", "0", {"B": "c=d"})


@pytest.mark.docker
async def test_one_of_two_duplicate_networks_is_used_and_kept(container: str, monkeypatch):
    monkeypatch.setattr(daemon_client, "NETWORK", name := f"harbortrainer-test-{os.getpid()}")
    async with Docker() as client:
        first = await client.networks.create({"Name": name, "Driver": "bridge"})
        try:
            second = await client.networks.create({"Name": name, "Driver": "bridge"})
        except DockerError:
            await first.delete()
            pytest.skip("this daemon refuses two networks of one name")
        try:
            assert await daemon_client.ensure_network(client) is None, "the network does not isolate containers"
            assert [network["Id"] for network in await daemon_client._list_networks(client)] == [first.id]
        finally:
            await first.delete()
        assert second.id not in {network["Id"] for network in await client.networks.list()}
        network_ids = await asyncio.gather(*(daemon_client.ensure_network(client) for _ in range(4)))
        remaining = await daemon_client._list_networks(client)
        await (await client.networks.get(remaining[0]["Id"])).delete()
        assert network_ids[0] and [remaining[0]["Id"]] == [network["Id"] for network in remaining]
