"""`harbortrainer sandboxes`: real sandboxes of a killed run are listed and ended; nothing of an active run is."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import leftovers
import psutil
import pytest

from harbortrainer.cli import main
from harbortrainer.commands import sandboxes
from harbortrainer.runs.label import RUN_VARIABLE, owner_of_process, run_label
from harbortrainer.sandbox import inventory
from harbortrainer.sandbox.inventory import InventoryError

WORKER = """
import asyncio, os, sys
from pathlib import Path
from test_direct_docker import make_environment
from harbortrainer.sandbox import host_view
from harbortrainer.sandbox.docker_environment import DockerSandbox
from harbortrainer.sandbox.inside.messages import SandboxSpec
from harbortrainer.sandbox.running_sandbox import RunningSandbox

async def main(kind, folder):
    if kind == "docker":
        await make_environment(DockerSandbox, folder, "FROM debian:12-slim\\n").start(force_build=False)
    else:
        sandbox = await RunningSandbox.start(SandboxSpec(name="fix-git"), host_view.view_of(Path("/")))
    print(os.getpid(), flush=True)
    await asyncio.sleep(600)

asyncio.run(main(sys.argv[1], Path(sys.argv[2])))
"""
RUN = """
import os, subprocess, sys, time
from harbortrainer.runs.label import OWNER_VARIABLE, this_owner
worker = [sys.executable, "-c", sys.argv[1], *sys.argv[2:]]
subprocess.Popen(worker, start_new_session=True, env=os.environ | {OWNER_VARIABLE: this_owner()})
time.sleep(600)
"""
TASKS = {"local": "fix-git", "docker": "compose-comparison"}


class KillableRun:
    """A run in its folder, with a worker that has a sandbox."""

    def __init__(self, kind: str, folder: Path) -> None:
        (folder / "run").mkdir()
        self.kind, self.folder, self.label = kind, folder / "run", run_label(folder / "run")
        variables = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), RUN_VARIABLE: self.label}
        words = [sys.executable, "-c", RUN, WORKER, kind, str(folder)]
        self.process = subprocess.Popen(words, env=variables, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.worker = psutil.Process(int(self.process.stdout.readline()))

    def kill(self, *, worker: bool) -> None:
        """Kill the run's process, and its worker too, as a machine that lacks memory may."""
        self.process.kill()
        self.process.wait()
        if worker:
            self.worker.kill()


@pytest.fixture
def run(environment_type: str, tmp_path: Path) -> Iterator[KillableRun]:
    run = KillableRun(environment_type, tmp_path)
    yield run
    run.process.kill()
    if run.worker.is_running():
        run.worker.kill()
    command = ["docker", "ps", "-aq", "--filter", f"label=harbortrainer.run={run.label}"]
    if environment_type == "docker" and (ids := subprocess.check_output(command, text=True).split()):
        subprocess.run(["docker", "rm", "-f", *ids], check=True)


def output(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> str:
    """Run `harbortrainer sandboxes`; return what it prints."""
    assert main(["sandboxes", *words]) == code
    printed = capsys.readouterr()
    return printed.out + (printed.err if code else "")


def test_sandbox_of_a_killed_run_is_listed_and_ended(run: KillableRun, capsys: pytest.CaptureFixture[str]) -> None:
    (row,) = [line.split() for line in output(capsys, "list", run.label).splitlines() if line.startswith(run.kind)]
    assert [row[0], row[2], row[3], row[-1]] == [run.kind, run.label, TASKS[run.kind], "running"]
    assert "this run is active" in output(capsys, "end", str(run.folder), "--yes", code=2)
    footprint = leftovers.footprint(run.worker.pid)
    run.kill(worker=run.kind == "docker")  # a local sandbox ends with its worker
    (row,) = [line.split() for line in output(capsys, "list", str(run.folder)).splitlines() if run.label in line]
    assert row[-1] == "ended"
    assert "ended 1 sandboxes" in output(capsys, "end", run.label, "--yes")
    assert "0 sandboxes" in output(capsys, "list", run.label)
    assert run.kind == "docker" or (not run.worker.is_running() and footprint.wait_gone() == [])


class FakeInventory:
    """Sandboxes of one type, of an ended, an active and an unknown owner."""

    def __init__(self) -> None:
        user, pid, _, machine = owner_of_process(os.getpid()).split(".")
        owners = (
            f"{user}.{pid}.1.{machine}",
            owner_of_process(os.getpid()),
            f"{user}.{pid}.1.elsewhere",
            f"5.1.1.{machine}",
        )
        names = ("ended", "active", "elsewhere", "others")
        self.sandboxes = [
            {"id": f"sb-{name}", "run": f"{name}-1", "owner": owner, "task": "t\x1b[31m", "since": "7"}
            for name, owner in zip(names, owners, strict=True)
        ]

    def find(self, run: str) -> list[dict[str, str]]:
        return [one for one in self.sandboxes if run in ("", one["run"])]

    def end(self, ids: list[str]) -> None:
        self.sandboxes = [one for one in self.sandboxes if one["id"] not in ids]


@pytest.fixture
def remaining(monkeypatch: pytest.MonkeyPatch) -> FakeInventory:
    fake = FakeInventory()
    monkeypatch.setattr(sandboxes, "all_kinds", lambda: ["toy"])
    for module in (inventory, sandboxes):
        monkeypatch.setattr(module, "inventory", lambda kind, pythons=(): fake)
    return fake


def ids(fake: FakeInventory) -> list[str]:
    return [one["id"] for one in fake.sandboxes]


def test_all_ends_only_what_no_living_process_owns(remaining, capsys) -> None:
    assert "1 of ended runs" in output(capsys, "list")
    output(capsys, "end", "--all", "--yes")
    assert ids(remaining) == ["sb-active", "sb-elsewhere", "sb-others"]
    assert "\x1b" not in output(capsys, "list")


def test_sandbox_of_another_machine_is_ended_only_by_name(remaining, capsys) -> None:
    assert "make sure that the run has ended" in output(capsys, "end", "elsewhere-1", "--yes")
    assert "no sandboxes of others-1 to end" in output(capsys, "end", "others-1", "--yes")
    assert "this run is active" in output(capsys, "end", "ended-1", "active-1", "--yes", code=2)
    assert "no run wrote this folder" in output(capsys, "end", str(Path(__file__).parent), "--yes", code=2)
    assert ids(remaining) == ["sb-ended", "sb-active", "sb-others"]


def test_asks_before_it_ends_anything(remaining, capsys, monkeypatch) -> None:
    for answer in ("n", "y"):
        monkeypatch.setattr("typer.confirm", lambda question, answer=answer: answer == "y")
        output(capsys, "end", "--all")
        assert ("sb-ended" in ids(remaining)) == (answer == "n")


@pytest.mark.parametrize("words", [[], ["ended-1", "--all"], ["none"]])
def test_refuses_unclear_choice(words, remaining, capsys) -> None:
    output(capsys, "end", *words, "--yes", code=2)
    assert len(remaining.sandboxes) == 4


def test_names_types_that_cannot_be_listed_or_ended(remaining, capsys, monkeypatch) -> None:
    def fail(*_: object) -> None:
        raise InventoryError("no answer")

    monkeypatch.setattr(remaining, "end", fail)
    assert "some sandboxes were not ended: toy: no answer" in output(capsys, "end", "--all", "--yes", code=1)
    monkeypatch.setattr(remaining, "find", fail)
    assert main(["sandboxes", "list"]) == 0
    assert "not listed: toy (no answer)" in capsys.readouterr().err


def test_folder_in_use_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from harbortrainer.runs.locks import RunLock

    lock = RunLock(tmp_path)
    assert "another run is using this folder" in output(capsys, "end", str(tmp_path), "--yes", code=2)
    lock.release()
