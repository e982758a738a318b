"""Containers that are started and used without Compose are what they are with it. Real containers, both ways."""

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

from harbortrainer.harbor_side.overlaid_docker import Asked
from harbortrainer.runs.label import RUN_LABEL, RUN_VARIABLE
from harbortrainer.sandbox.containers import background_end, daemon_client, exec_words
from harbortrainer.sandbox.containers.compose_service import NotTranslatedError, container_config, main_service
from harbortrainer.sandbox.docker_examination import docker
from harbortrainer.sandbox.labelled_docker import LabelledDocker

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
    'echo "$FROM_IMAGE|$FROM_TASK|$GIVEN"': {"env": {"GIVEN": "x'y\"z\\ \t$HOME `id` é\nnext"}},
    "env | sort | grep -v '^HOSTNAME='": {"env": {"PATH": "/bin:/usr/bin", "BASH_ENV": "/none", "UID_": "5"}},
    "env | sort | grep -v '^HOSTNAME=' ": {"env": {"RANDOM": "5", "UID": "7", "with-dash": "1", "SHLVL": "9"}},
    "cat": {},
    "echo 'x\\'; $'": {},
    "kill -9 $$": {},
    "no-such-program": {},
    "id -un ": {"user": "nobody-here"},
    "echo $0 $# $-; ulimit -a; umask; cat /proc/self/oom_score_adj": {},
    "head -c 300000 /dev/zero | tr '\\0' x": {},
    "head -c 1000 /dev/urandom | sha256sum | wc -c; printf '\\377\\0\\001'": {},
    "cat /sys/fs/cgroup/memory/memory.limit_in_bytes /sys/fs/cgroup/memory.max 2>/dev/null": {},
    "grep -c . /etc/hosts; cat /mnt/data/file; touch /mnt/data/x 2>&1; test -w /logs/agent && echo w": {},
    "ps -o pid= -C sleep | wc -l; cat /proc/1/comm": {},
    "cat /srv/link/*.sh /srv/new/deep/*.sh /srv/work/*; stat -c '%a %n' /srv/new/deep/run.sh; ls -R /srv": {},
}

pytestmark = [pytest.mark.docker, pytest.mark.usefixtures("container")]


class ByCompose(LabelledDocker):
    """As it is where a task has sidecars: Compose does everything."""

    async def instead_of_compose(self, asked: Asked) -> None:
        return None


def environment(kind: type[LabelledDocker], folder: Path, dockerfile: str = DOCKERFILE, **more: Any) -> LabelledDocker:
    """One in a folder of its own, not started."""
    if not (folder / "task").exists():
        make_task(folder / "task", dockerfile=dockerfile)
        (folder / "data").mkdir()
        (folder / "data" / "file").write_text("mounted\n")
    own = folder / kind.__name__
    (own / "logs").mkdir(parents=True)
    bind = {"type": "bind", "source": str(folder / "data"), "target": "/mnt/data", "read_only": True}
    return kind(
        environment_dir=folder / "task" / "environment",
        environment_name="both-ways",
        session_id=f"Both_{folder.name}__{kind.__name__}",
        trial_paths=TrialPaths(trial_dir=own),
        task_env_config=EnvironmentConfig(memory_mb=300, cpus=1, env={"FROM_TASK": "1"}),
        mounts=[bind, {"type": "bind", "source": str(own / "logs"), "target": "/logs/agent"}],
        **more,
    )


async def what_happens(box: LabelledDocker, folder: Path) -> dict[str, tuple[int, str | None]]:
    """What each command gives, after files were put there in every way."""
    (folder / "files" / "sub").mkdir(parents=True, exist_ok=True)
    (folder / "files" / "run.sh").write_text("#!/bin/sh\n")
    (folder / "files" / "run.sh").chmod(0o750)
    (folder / "files" / "sub" / "more").write_text("more\n")
    for target in ("/srv/link", "/srv/new/deep"):
        await box.upload_dir(folder / "files", target)
    for target in ("/srv/work/", "/srv/work", "/srv/work/other.sh", "/srv/made/for/it"):
        await box.upload_file(folder / "files" / "run.sh", target)
    found = {}
    for command, how in COMMANDS.items():
        done = await box.exec(command, **how)
        found[command] = (done.return_code, done.stdout)
    found["no folder"] = ((await box.exec("true", cwd="/no/such/folder")).return_code, None)
    await box.download_dir("/srv/link", folder / type(box).__name__ / "fetched")
    found["fetched"] = (0, str(sorted(path.name for path in (folder / type(box).__name__ / "fetched").rglob("*"))))
    return found


async def test_every_command_and_file_is_as_with_compose(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(RUN_VARIABLE, run := f"test-{tmp_path.name}")
    found = {}
    for kind in (LabelledDocker, ByCompose):
        box = environment(kind, tmp_path)
        await box.start(force_build=False)
        try:
            found[kind] = await what_happens(box, tmp_path)
            carries = await docker("ps", "-q", "--filter", f"label={RUN_LABEL}={run}")
            assert len(carries.out.split()) == 1
        finally:
            await box.stop(delete=True)
        await background_end.finished()
        assert (await docker("ps", "-aq", "--filter", f"label={RUN_LABEL}={run}")).out == ""
    for command in (*COMMANDS, "no folder", "fetched"):
        assert found[LabelledDocker][command] == found[ByCompose][command], command


async def test_a_command_that_takes_too_long_is_told_as_harbor_tells_it(tmp_path: Path):
    box = environment(LabelledDocker, tmp_path)
    await box.start(force_build=False)
    try:
        with pytest.raises(RuntimeError, match="Command timed out after 1 seconds"):
            await box.exec("sleep 60", timeout_sec=1)
        assert (await box.exec("echo still here")).stdout == "still here\n"
    finally:
        await box.stop(delete=True)


async def test_a_container_that_ends_at_once_is_told_with_what_it_said(tmp_path: Path):
    ends = 'FROM debian:12-slim\nENTRYPOINT ["sh", "-c", "echo no database; exit 3"]\nHEALTHCHECK CMD false\n'
    box = environment(LabelledDocker, tmp_path, ends)
    try:
        with pytest.raises(RuntimeError, match="ended with code 3 at its start: no database"):
            await box.start(force_build=False)
        assert (await docker("ps", "-aq", "--filter", f"label=harbortrainer.trial={box.session_id}")).out == ""
    finally:
        await box.stop(delete=True)


async def test_a_container_that_is_to_be_kept_is_stopped_and_kept(tmp_path: Path):
    box = environment(LabelledDocker, tmp_path, "FROM debian:12-slim\n", keep_containers=True)
    await box.start(force_build=False)
    await box.exec("touch /kept")
    await box.stop(delete=True)
    (kept,) = (await docker("ps", "-aq", "--filter", f"label=harbortrainer.trial={box.session_id}")).out.split()
    try:
        assert (await docker("inspect", "--format", "{{.State.Running}}", kept)).out == "false\n"
        assert "A /kept" in (await docker("diff", kept)).out
    finally:
        await docker("rm", "-f", kept)


async def test_a_network_that_somebody_removed_is_made_again(tmp_path: Path):
    for name in ("first", "second"):
        box = environment(LabelledDocker, tmp_path / name, "FROM debian:12-slim\n")
        await box.start(force_build=False)
        await box.stop(delete=True)
        await background_end.finished()
        await docker("network", "rm", "harbortrainer-apart")  # refused while another test's container is in it


@pytest.mark.docker
async def test_no_container_starts_where_others_could_reach_it(container: str, tmp_path: Path, monkeypatch):
    answers = iter(["0" * 64, None])  # it was there; now somebody has made one of its name that keeps nobody apart

    async def network_of(client: Docker) -> str | None:
        return next(answers)

    monkeypatch.setattr(daemon_client, "_known", {})
    monkeypatch.setattr(daemon_client, "network_of", network_of)
    box = environment(LabelledDocker, tmp_path, "FROM debian:12-slim\n")
    with pytest.raises(RuntimeError, match="keeps containers apart"):
        await box.start(force_build=False)
    assert not (await docker("ps", "-aq", "--filter", f"name={box.session_id}")).out.strip()


def files(folder: Path, *services: dict) -> list[Path]:
    """Compose files as Harbor writes them."""
    paths = [folder / f"{number}.json" for number in range(len(services))]
    for path, service in zip(paths, services, strict=True):
        path.write_text(json.dumps({"services": {"main": service}}))
    return paths


def test_what_harbor_says_of_a_service_is_what_the_daemon_is_told(tmp_path: Path):
    bind = {"type": "bind", "source": "/a", "target": "/b", "read_only": True}
    service = main_service(
        files(
            tmp_path,
            {"cpus": 2.0, "mem_limit": "512m"},
            {"environment": {"A": "1"}, "labels": {"x": "1"}},
            {"volumes": [bind]},
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
    ],
    ids=lambda service: next(iter(service)),
)
def test_whatever_else_is_said_is_left_to_compose(tmp_path: Path, service: dict):
    with pytest.raises(NotTranslatedError):
        container_config(main_service(files(tmp_path, {"init": True}, service)))


def test_sidecars_are_left_to_compose(tmp_path: Path):
    path = tmp_path / "more.json"
    path.write_text(json.dumps({"services": {"main": {}, "database": {}}}))
    with pytest.raises(NotTranslatedError):
        main_service([path])


def test_words_that_are_not_known_are_left_to_compose():
    assert exec_words.command_of(["exec", "--index", "2", "main", "true"]) is None
    assert exec_words.command_of(["exec", "database", "sh", "-c", "true"]) is None
    assert exec_words.upload_of(["cp", "main:/a", "b"]) is None
    known = exec_words.command_of(["exec", "-T", "-w", "/a", "-e", "B=c=d", "-u", "0", "main", "bash", "-c", "x"])
    assert known == exec_words.ServiceCommand(["bash", "-c", "x"], "/a", "0", {"B": "c=d"})


@pytest.mark.docker
async def test_of_two_networks_that_were_made_at_once_one_is_taken_and_stays(container: str, monkeypatch):
    monkeypatch.setattr(daemon_client, "NETWORK", name := f"harbortrainer-test-{os.getpid()}")
    async with Docker() as client:
        first = await client.networks.create({"Name": name, "Driver": "bridge"})
        try:
            second = await client.networks.create({"Name": name, "Driver": "bridge"})
        except DockerError:
            await first.delete()
            pytest.skip("this daemon makes no two networks of one name")
        try:
            assert await daemon_client.network_of(client) is None, "containers in it would reach each other"
            assert [network["Id"] for network in await daemon_client._networks(client)] == [first.id]
        finally:
            await first.delete()
        assert second.id not in {network["Id"] for network in await client.networks.list()}
        chosen = await asyncio.gather(*(daemon_client.network_of(client) for _ in range(4)))
        left = await daemon_client._networks(client)
        await (await client.networks.get(left[0]["Id"])).delete()
        assert chosen[0] and [left[0]["Id"]] == [network["Id"] for network in left]
