"""Copies of mounted log folders: only regular files, whatever a container has put there."""

import os
import stat
from pathlib import Path

import pytest

from harbortrainer.sandbox.containers import log_folders
from harbortrainer.sandbox.containers.log_folders import AgentLogs, VerifierLogs
from harbortrainer.sandbox.inside.regular_files import open_regular


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A log folder with two honest files."""
    (tmp_path / "agent" / "deep").mkdir(parents=True)
    (tmp_path / "agent" / "deep" / "log").write_text("a line\n")
    (tmp_path / "agent" / "reward.txt").write_text("1\n")
    return tmp_path / "agent"


def content(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*") if path.is_file()}


def test_honest_files_are_copied_and_put_back(folder: Path):
    logs, before = VerifierLogs(folder, "box"), content(folder)
    mounted = folder.stat().st_ino
    logs.detach()
    logs.detach()
    assert content(folder) == before
    assert folder.stat().st_ino != mounted
    logs.attach()
    assert content(folder) == before
    assert folder.stat().st_ino == mounted


def test_only_regular_files_are_copied(tmp_path: Path, folder: Path):
    (tmp_path / "secret").write_text("of this machine")
    (folder / "link").symlink_to(tmp_path / "secret")
    (folder / "folder").symlink_to(tmp_path)
    (folder / "loop").symlink_to(folder / "loop")
    os.mkfifo(folder / "pipe")
    with (folder / "sparse").open("wb") as file:
        os.truncate(file.fileno(), 1 << 40)
    VerifierLogs(folder, "box").detach()
    assert {path.name for path in folder.rglob("*")} == {"deep", "log", "reward.txt"}


def test_what_changes_later_is_not_seen(folder: Path):
    mounted = os.open(folder, os.O_RDONLY)  # as the container holds it
    logs = VerifierLogs(folder, "box")
    logs.detach()
    os.unlink("reward.txt", dir_fd=mounted)
    os.mkfifo("reward.txt", dir_fd=mounted)
    os.close(mounted)
    assert (folder / "reward.txt").read_text() == "1\n"
    logs.remove_mounted()
    assert [path.name for path in folder.parent.iterdir()] == ["agent"]


def test_separate_verifiers_container_leaves_the_agents_folder(folder: Path):
    before = content(folder)
    agent, verifier = VerifierLogs(folder, "agent"), VerifierLogs(folder, "verifier")
    agent.detach()
    verifier.detach()
    verifier.remove_mounted()
    agent.attach()
    assert content(folder) == before


def test_files_that_harbor_has_moved_away_do_not_return(folder: Path):
    logs = VerifierLogs(folder, "box")
    logs.detach()
    for path in list(folder.iterdir()):
        path.rename(folder.parent / path.name)
    (folder.parent / ".agent-box" / "new").write_text("since then")
    logs.attach()
    assert content(folder) == {"new": "since then"}


def test_number_and_size_of_files_are_bounded(folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(log_folders, "_MAX_BYTES", 8)
    VerifierLogs(folder, "box").detach()
    assert len(content(folder)) == 1


def test_agent_and_harness_write_into_different_folders(tmp_path: Path):
    (mine := tmp_path / "mine").write_text("of this machine")
    (own := tmp_path / "agent").mkdir()
    logs = AgentLogs(own, "box")
    volumes = [{"source": str(own), "target": "/logs/agent"}, {"source": "/other", "target": "/other"}]
    assert [volume["source"] for volume in logs.mount(volumes)] == [str(logs.mounted), "/other"]
    logs.create()
    (logs.mounted / "trajectory.json").symlink_to(mine)
    (logs.mounted / "late.json").symlink_to(mine)
    (logs.mounted / "log").write_text("inside")
    (own / "trajectory.json").write_text("{}")
    (own / "log").touch()  # as Harbor's oracle does
    logs.collect()
    (own / "late.json").write_text("[]")
    assert content(own) == {"trajectory.json": "{}", "log": "inside", "late.json": "[]"}
    inode = (logs.mounted / "log").stat().st_ino
    logs.publish()
    assert content(logs.mounted) == content(own)
    assert (logs.mounted / "log").stat().st_ino == inode
    assert mine.read_text() == "of this machine"


def test_files_of_the_last_agent_are_removed_once_moved(tmp_path: Path):
    (own := tmp_path / "agent").mkdir()
    logs = AgentLogs(own, "box")
    logs.mount([{"source": str(own), "target": "/logs/agent"}])
    logs.create()
    (logs.mounted / "log").write_text("of the first step")
    logs.collect()
    logs.collect()
    (own / "log").rename(tmp_path / "log")
    (logs.mounted / "setup").write_text("of the second step")
    logs.begin()
    logs.collect()
    assert content(own) == {"setup": "of the second step"}
    logs.remove_mounted()
    assert not logs.mounted.exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root makes devices")
def test_devices_are_not_opened(tmp_path: Path):
    """Opening a device without a driver fails with another error; that of a watchdog would start it."""
    os.mknod(tmp_path / "device", stat.S_IFCHR | 0o666, os.makedev(250, 255))
    with pytest.raises(OSError, match="not a regular file"):
        open_regular(str(tmp_path / "device"))
