"""Real containers: the shipped tasks under Docker, and what a run leaves of them."""

import shutil
import subprocess
from pathlib import Path

import pytest

from harbortrainer.sandbox.docker import RUN_LABEL, RUN_VARIABLE
from harbortrainer.tasks.check import check_tasks
from harbortrainer.tasks.source import load_folder

SAMPLES = Path(__file__).parents[2] / "datasets" / "harbor_tasks"
KINDS = {
    "single-step": "rename-photos",
    "multi-step": "incident-two-steps",
    "separate-verifier": "scrub-secrets",
}


def docker(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["docker", *arguments], capture_output=True, text=True, timeout=60, check=False)


def why_not() -> str:
    """Why no container can run here, empty when one can."""
    if shutil.which("docker") is None:
        return "there is no docker command"
    if docker("info").returncode:
        return "no Docker daemon answers"
    if docker("compose", "version").returncode:
        return "Compose v2 is not installed"
    if docker("image", "inspect", "debian:12-slim").returncode:
        return "the image debian:12-slim is not here (and tests pull nothing)"
    return ""


REASON = why_not()
pytestmark = [pytest.mark.docker, pytest.mark.e2e, pytest.mark.skipif(bool(REASON), reason=REASON)]


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
    assert labelled(run) == []
