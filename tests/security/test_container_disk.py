"""An agent that fills the disk of the Docker daemon or of the trials. Real trials, with a daemon on a small disk.

The container is removed as soon as that is detected, the trial gets 0, and the disk is free again.
"""

import asyncio
import errno
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from attempts import Played, play
from fakes import DONE, keys
from small_daemon import run, small_daemon, why_not

from harbortrainer.environment.rollout_state import Attempts, trace_error
from harbortrainer.sandbox.containers.disk_usage import ContainerDisks
from harbortrainer.trials import Outcome

pytestmark = [pytest.mark.docker, pytest.mark.e2e, pytest.mark.long]

MB = 1 << 20
ATTEMPTS = 3
GRADES = "echo 0.25 > /logs/verifier/reward.txt"
FILLS = {
    "a file that grows": "dd if=/dev/zero of=/big bs=1M",
    "a file without a name": "exec 3> /big; rm /big; dd if=/dev/zero bs=1M >&3",
    "its log folder": "dd if=/dev/zero of=/logs/agent/big bs=1M",
    "one that goes on": "(while :; do dd if=/dev/zero of=/big$RANDOM bs=1M; done) 2>/dev/null &",
}


@contextmanager
def small_disk(folder: Path) -> Generator[Path]:
    folder.mkdir()
    run(["mount", "-t", "tmpfs", "-o", "size=200m", "tmpfs", str(folder)])
    try:
        yield folder
    finally:
        run(["umount", str(folder)])


@pytest.fixture(scope="module")
def daemon(container: str) -> Generator[Path]:
    """Folder of the daemon's disk."""
    if reason := why_not():
        pytest.skip(reason)
    with TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        disk = Path(folder, "disk")
        disk.mkdir()
        with small_daemon(disk) as address:
            patch.setenv("DOCKER_HOST", address)
            yield disk


async def attempt(folder: Path, command: str) -> Played:
    script = [keys(command, duration=6), keys("true", duration=0.1), DONE, DONE]
    return await play(folder, script, test=GRADES, environment_type="docker")


def is_self_inflicted(trial: Played) -> bool:
    assert (trial.record.outcome, trial.record.reward) == (Outcome.self_inflicted, 0.0), trial.record
    assert "the disk is full: the container wrote " in trial.record.evidence
    assert "a fresh container starts and answers" in trial.record.evidence
    return trace_error(trial.record, Attempts()) is None


@pytest.mark.parametrize("case", ["a file that grows", "a file without a name"])
async def test_container_that_fills_daemon_disk_is_removed(tmp_path: Path, daemon: Path, case: str):
    assert is_self_inflicted(await attempt(tmp_path, FILLS[case]))
    assert ContainerDisks.measure(daemon, None, None).free[daemon] > 400 * MB
    assert not run(["docker", "ps", "-aq"])


@pytest.mark.parametrize("case", ["its log folder", "one that goes on"])
async def test_container_that_fills_shared_disk_is_removed(daemon: Path, case: str):
    """If the disk has no space for the trial's record either, the trial is void and runs again."""
    for number in range(ATTEMPTS):
        folder = daemon / f"{case.replace(' ', '-')}-{number}"
        folder.mkdir()
        try:
            trial = await attempt(folder, FILLS[case])
        except OSError as error:
            assert error.errno == errno.ENOSPC
        else:
            assert is_self_inflicted(trial)
            return
    pytest.fail("no record of it was ever written")


def test_trial_files_are_truncated_only_if_disk_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (log := tmp_path / "log").write_bytes(bytes(2 * MB))
    disks = ContainerDisks.measure(tmp_path, None, None)
    disks.truncate_files()
    assert log.stat().st_size == 2 * MB
    monkeypatch.setattr("harbortrainer.sandbox.containers.disk_usage._FULL_B", 1 << 60)
    disks.truncate_files()
    assert log.stat().st_size == 0


async def test_container_that_fills_trials_disk_is_self_inflicted(tmp_path: Path, container: str):
    if reason := why_not():
        pytest.skip(reason)
    with small_disk(tmp_path / "trials") as folder:
        assert is_self_inflicted(await attempt(folder, FILLS["its log folder"]))


async def test_disk_filled_by_others_does_not_blame_agent(tmp_path: Path, daemon: Path):
    big = daemon / "big"
    await asyncio.to_thread(_write, big, mb=400)
    script = [keys("head -c 20M /dev/zero > /some"), _filling(big), DONE, DONE]
    try:
        trial = await play(tmp_path, script, test=GRADES, environment_type="docker")
    finally:
        big.unlink()
    assert trial.record.outcome in (Outcome.sandbox_error, Outcome.completed), trial.record
    assert "its own files" not in trial.record.evidence


def _filling(big: Path):
    async def answer(body: dict) -> str:
        await asyncio.to_thread(_write, big, mb=1000)
        return keys("true")

    return answer


def _write(file: Path, *, mb: int) -> None:
    """Append up to `mb` megabytes, until the disk is full."""
    with suppress(OSError), file.open("ab") as out:
        for _ in range(mb):
            out.write(bytes(MB))


@pytest.mark.parametrize(
    ("layer", "logs", "storage_mb", "blamed"),
    [(60, 0, None, True), (40, 0, None, False), (40, 30, None, True), (40, 0, 30, True), (20, 0, 30, False)],
)
async def test_blame_depends_on_share_of_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layer: int, logs: int, storage_mb: int | None, blamed: bool
):
    """100 MB were free at the start; using more than half, or more than the task's storage, is self-inflicted."""
    trial, root = tmp_path / "trial", tmp_path
    trial.mkdir()
    disks = ContainerDisks(trial, root, storage_mb * MB if storage_mb else None, {trial: 100 * MB, root: 100 * MB})
    (trial / "log").write_bytes(b"x" * logs * MB)

    async def written() -> int:
        return layer * MB

    assert await disks.overuse(written) == ""  # the disk is not full
    monkeypatch.setattr("harbortrainer.sandbox.containers.disk_usage._FULL_B", 1 << 60)
    assert bool(await disks.overuse(written)) is blamed
