"""The shipped tasks in real containers, which are removed at the end."""

import asyncio
import subprocess
from pathlib import Path

import pytest

from harbortrainer.runs.label import RUN_LABEL, RUN_VARIABLE
from harbortrainer.sandbox.containers import container_exit
from harbortrainer.tasks.task_check import check_tasks
from harbortrainer.tasks.task_folder import load_folder

SAMPLES = Path(__file__).parents[2] / "datasets" / "harbor_tasks"
KINDS = {
    "single-step": "rename-photos",
    "multi-step": "incident-two-steps",
    "separate-verifier": "scrub-secrets",
}


def docker(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["docker", *arguments], capture_output=True, text=True, timeout=60, check=False)


pytestmark = [pytest.mark.docker, pytest.mark.e2e, pytest.mark.usefixtures("container")]


def containers_of_run(run: str) -> list[str]:
    return docker("ps", "-aq", "--filter", f"label={RUN_LABEL}={run}").stdout.split()


@pytest.mark.parametrize("kind", KINDS)
async def test_sample_task_runs_in_containers(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run = f"test-{kind}"
    monkeypatch.setenv(RUN_VARIABLE, run)
    containers: set[str] = set()

    async def watch() -> None:
        while True:
            containers.update(await asyncio.to_thread(containers_of_run, run))
            await asyncio.sleep(0.2)

    watcher = asyncio.create_task(watch())
    (verdict,) = await check_tasks(load_folder(SAMPLES, include=[KINDS[kind]]), environment_type="docker")
    watcher.cancel()
    assert verdict.problem == ""
    assert containers
    await container_exit.wait_removed()
    assert containers_of_run(run) == []
