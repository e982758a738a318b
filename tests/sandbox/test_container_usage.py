"""Container usage from cgroup files and from the daemon, exhausted limits, and process limits."""

import json
from pathlib import Path

import pytest

from harbortrainer.sandbox.containers.direct_docker import container_config
from harbortrainer.sandbox.containers.usage import ContainerUsage, process_limit
from harbortrainer.sandbox.docker_examination import full_filesystems

MB = 1 << 20
ID = "6ca7fab0d856"
CGROUP_V1_FILES = {
    "proc/7/cgroup": f"9:pids:/docker/{ID}\n5:cpu,memory:/docker/{ID}/child\n1:name=systemd:/docker/{ID}\n0::/\n",
    f"sys/fs/cgroup/pids/docker/{ID}/pids.current": "80\n",
    f"sys/fs/cgroup/pids/docker/{ID}/pids.max": "100\n",
    f"sys/fs/cgroup/memory/docker/{ID}/memory.usage_in_bytes": f"{50 * MB}\n",
    f"sys/fs/cgroup/memory/docker/{ID}/memory.limit_in_bytes": f"{60 * MB}\n",
    f"sys/fs/cgroup/memory/docker/{ID}/memory.stat": (
        f"inactive_file 1\nactive_file 1\ntotal_inactive_file {20 * MB}\ntotal_active_file {10 * MB}\n"
    ),
}
CGROUP_V2_FOLDER = f"sys/fs/cgroup/system.slice/docker-{ID}.scope"
CGROUP_V2_FILES = {
    "proc/7/cgroup": f"0::/system.slice/docker-{ID}.scope/init.scope\n",
    f"{CGROUP_V2_FOLDER}/pids.current": "80\n",
    f"{CGROUP_V2_FOLDER}/pids.max": "max\n",
    f"{CGROUP_V2_FOLDER}/memory.current": f"{50 * MB}\n",
    f"{CGROUP_V2_FOLDER}/memory.max": f"{55 * MB}\n",
    f"{CGROUP_V2_FOLDER}/memory.stat": f"anon 5\ninactive_file {1 * MB}\nactive_file 0\n",
}


def write_files(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def test_reads_cgroup_v1(tmp_path: Path):
    usage = ContainerUsage.from_kernel(7, ID, write_files(tmp_path, CGROUP_V1_FILES))
    assert usage == ContainerUsage(80, 100, 20 * MB, 60 * MB)
    assert usage.shortage == "80 of 100 processes ran"


def test_reads_cgroup_v2_of_container_not_of_its_child(tmp_path: Path):
    usage = ContainerUsage.from_kernel(7, ID, write_files(tmp_path, CGROUP_V2_FILES))
    assert usage == ContainerUsage(80, 0, 49 * MB, 55 * MB)
    assert usage.shortage == "memory was at 49 of 55 MB"


@pytest.mark.parametrize("pid", [7, 8])
def test_ignores_process_of_another_container(tmp_path: Path, pid: int):
    assert ContainerUsage.from_kernel(pid, "another-id", write_files(tmp_path, CGROUP_V2_FILES)) is None


def test_unknown_cgroup_layout_gives_none(tmp_path: Path):
    files = {"proc/7/cgroup": CGROUP_V2_FILES["proc/7/cgroup"]}
    assert ContainerUsage.from_kernel(7, ID, write_files(tmp_path, files)) is None


def test_reads_daemon_stats():
    stats = {
        "pids_stats": {"current": 10, "limit": (1 << 64) - 1},
        "memory_stats": {"usage": 50 * MB, "limit": 55 * MB, "stats": {"inactive_file": 10 * MB}},
    }
    assert ContainerUsage.from_daemon(stats) == ContainerUsage(10, (1 << 64) - 1, 40 * MB, 55 * MB)
    assert ContainerUsage.from_daemon(stats).shortage == ""
    assert ContainerUsage.from_daemon({}).shortage == ""


@pytest.mark.parametrize(
    ("compose", "added"),
    [
        ("services: {main: {pids_limit: 5000}}", {}),
        ("services: {main: {deploy: {resources: {limits: {pids: 5000}}}}}", {}),
        ("services: {main: {mem_limit: 1g}}", {"pids_limit": 7}),
        (
            "services: {main: {deploy: {resources: {limits: {memory: 1g}}}}}",
            {"deploy": {"resources": {"limits": {"pids": 7}}}},
        ),
    ],
)
def test_process_limit_fits_limits_of_task(tmp_path: Path, compose: str, added: dict[str, object]):
    (tmp_path / "docker-compose.yaml").write_text(compose)
    (tmp_path / "other.json").write_text(json.dumps({"services": {}}))
    assert process_limit([tmp_path / "other.json", tmp_path / "docker-compose.yaml"], 7) == added


def test_process_limit_is_passed_to_daemon():
    assert container_config({"pids_limit": 7})["HostConfig"] == {"PidsLimit": 7}


def test_filesystem_is_full_without_blocks_or_inodes():
    output = "15 4096 9 9 /\n16 4096 9 9 /tmp\n16 4096 0 9 /dev/shm\n99 4096 0 0 /var\n"
    assert full_filesystems(output) == ["/ was full", "/dev/shm was full of files"]


@pytest.mark.parametrize(
    "output", ["", "no such program\n", "1 2 3\n", "a b c d /\n", "1 2 3 4 5 6 7\n", "-1 1 1 1 /\n"]
)
def test_forged_statfs_output_is_ignored(output: str):
    assert full_filesystems(output) == []
