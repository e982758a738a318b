"""What a container uses, as the kernel's files and the daemon tell it, and what follows."""

import json
from pathlib import Path

import pytest

from harbortrainer.sandbox.containers.compose_service import container_config
from harbortrainer.sandbox.containers.container_limits import say_processes
from harbortrainer.sandbox.containers.container_usage import ContainerUsage
from harbortrainer.sandbox.docker_examination import full_places

MB = 1 << 20
ID = "6ca7fab0d856"
VERSION_1 = {
    "proc/7/cgroup": f"9:pids:/docker/{ID}\n5:cpu,memory:/docker/{ID}/below\n1:name=systemd:/docker/{ID}\n0::/\n",
    f"sys/fs/cgroup/pids/docker/{ID}/pids.current": "80\n",
    f"sys/fs/cgroup/pids/docker/{ID}/pids.max": "100\n",
    f"sys/fs/cgroup/memory/docker/{ID}/memory.usage_in_bytes": f"{50 * MB}\n",
    f"sys/fs/cgroup/memory/docker/{ID}/memory.limit_in_bytes": f"{60 * MB}\n",
    f"sys/fs/cgroup/memory/docker/{ID}/memory.stat": (
        f"inactive_file 1\nactive_file 1\ntotal_inactive_file {20 * MB}\ntotal_active_file {10 * MB}\n"
    ),
}
GROUP = f"sys/fs/cgroup/system.slice/docker-{ID}.scope"
VERSION_2 = {
    "proc/7/cgroup": f"0::/system.slice/docker-{ID}.scope/init.scope\n",
    f"{GROUP}/pids.current": "80\n",
    f"{GROUP}/pids.max": "max\n",
    f"{GROUP}/memory.current": f"{50 * MB}\n",
    f"{GROUP}/memory.max": f"{55 * MB}\n",
    f"{GROUP}/memory.stat": f"anon 5\ninactive_file {1 * MB}\nactive_file 0\n",
}


def machine(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def test_control_groups_of_version_1_are_read_by_their_controllers(tmp_path: Path):
    found = ContainerUsage.of_kernel(7, ID, machine(tmp_path, VERSION_1))
    assert found == ContainerUsage(80, 100, 20 * MB, 60 * MB)
    assert found.shortage == "80 of 100 processes ran"


def test_control_groups_of_version_2_are_read_where_the_container_begins(tmp_path: Path):
    found = ContainerUsage.of_kernel(7, ID, machine(tmp_path, VERSION_2))
    assert found == ContainerUsage(80, 0, 49 * MB, 55 * MB)
    assert found.shortage == "memory was at 49 of 55 MB"


@pytest.mark.parametrize("pid", [7, 8])
def test_a_process_of_that_number_that_is_not_the_containers_is_not_asked(tmp_path: Path, pid: int):
    assert ContainerUsage.of_kernel(pid, "another-id", machine(tmp_path, VERSION_2)) is None


def test_a_machine_whose_groups_lie_elsewhere_is_not_guessed_at(tmp_path: Path):
    assert ContainerUsage.of_kernel(7, ID, machine(tmp_path, {"proc/7/cgroup": VERSION_2["proc/7/cgroup"]})) is None


def test_the_daemon_tells_the_same():
    said = {
        "pids_stats": {"current": 10, "limit": (1 << 64) - 1},
        "memory_stats": {"usage": 50 * MB, "limit": 55 * MB, "stats": {"inactive_file": 10 * MB}},
    }
    assert ContainerUsage.of_daemon(said) == ContainerUsage(10, (1 << 64) - 1, 40 * MB, 55 * MB)
    assert ContainerUsage.of_daemon(said).shortage == ""
    assert ContainerUsage.of_daemon({}).shortage == ""


@pytest.mark.parametrize(
    ("said", "own"),
    [
        ("services: {main: {pids_limit: 5000}}", True),
        ("services: {main: {deploy: {resources: {limits: {pids: 5000}}}}}", True),
        ("services: {main: {mem_limit: 1g}}", False),
    ],
)
def test_what_a_task_says_of_processes_holds(tmp_path: Path, said: str, own: bool):
    (tmp_path / "docker-compose.yaml").write_text(said)
    (tmp_path / "other.json").write_text(json.dumps({"services": {}}))
    assert say_processes([tmp_path / "other.json", tmp_path / "docker-compose.yaml"]) is own


def test_a_limit_of_processes_is_the_daemons_too():
    assert container_config({"pids_limit": 7})["HostConfig"] == {"PidsLimit": 7}


def test_a_place_is_full_without_bytes_or_without_files():
    said = "15 4096 9 9 /\n16 4096 9 9 /tmp\n16 4096 0 9 /dev/shm\n99 4096 0 0 /var\n"
    assert full_places(said) == ["/ was full", "/dev/shm was full of files"]


@pytest.mark.parametrize("said", ["", "no such program\n", "1 2 3\n", "a b c d /\n", "1 2 3 4 5 6 7\n", "-1 1 1 1 /\n"])
def test_a_program_that_the_agent_has_put_there_says_nothing(said: str):
    assert full_places(said) == []
