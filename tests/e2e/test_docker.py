"""Real containers: the shipped tasks under Docker, and what a run leaves of them."""

import subprocess
from pathlib import Path

import pytest

from harbortrainer.runs.label import RUN_LABEL, RUN_VARIABLE
from harbortrainer.sandbox.containers import background_end
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


def labelled(run: str) -> list[str]:
    return docker("ps", "-aq", "--filter", f"label={RUN_LABEL}={run}").stdout.split()


@pytest.mark.parametrize("kind", KINDS)
async def test_sample_task_runs_in_containers(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run = f"test-{kind}"
    monkeypatch.setenv(RUN_VARIABLE, run)
    seen: set[str] = set()
    (verdict,) = await check_tasks(
        load_folder(SAMPLES, include=[KINDS[kind]]),
        environment_type="docker",
        on_verdict=lambda v: seen.update(labelled(run)),
    )
    assert verdict.problem == ""
    await background_end.finished()
    assert labelled(run) == []
