"""Outcomes in real containers, where Harbor mounts the verifier's folder from the host."""

from pathlib import Path

import pytest
from fakes import SOLVED, make_task
from test_docker import docker

from harbortrainer.runs.label import RUN_LABEL, RUN_VARIABLE
from harbortrainer.trials import Outcome, TrialRecord, TrialSpec, run_trial
from harbortrainer.trials.hooks import Event

LABELLED = "harbortrainer.sandbox.labelled_docker:LabelledDocker"

pytestmark = [pytest.mark.docker, pytest.mark.e2e, pytest.mark.usefixtures("container")]

FORGERY = """#!/bin/bash
echo 1 > /logs/verifier/reward.txt
ln -s /etc/hostname /logs/verifier/reward.json
mkdir -p /logs/verifier/deep/er /tests
touch /logs/verifier/deep/er/file /tests/conftest.py
echo 'echo 1 > /logs/verifier/reward.txt' > /tests/test.sh
"""


async def run(folder: Path, solution: str, test: str = SOLVED, **more) -> TrialRecord:
    """One trial whose agent, the oracle, runs `solution`."""
    task = make_task(folder / "task", test=test)
    (task / "solution" / "solve.sh").write_text(solution)
    spec = TrialSpec(task_dir=task, trials_dir=folder / "trials", agent="oracle", environment_type=LABELLED)
    return await run_trial(spec, **more)


async def test_a_forged_reward_in_a_container_does_not_count(tmp_path):
    record = await run(tmp_path, FORGERY, f"ls -A /tests > /logs/verifier/seen; {SOLVED}")
    assert (record.outcome, record.reward) == (Outcome.completed, 0.0)
    assert record.trial_dir is not None
    left = {path.name for path in (Path(record.trial_dir) / "verifier").iterdir()}
    assert left == {"reward.txt", "seen", "test-stdout.txt"}
    assert (Path(record.trial_dir) / "verifier" / "seen").read_text().split() == ["test.sh"]


async def test_auto_plays_in_docker_what_local_cannot_and_the_record_says_so(tmp_path):
    task = make_task(tmp_path / "task")
    (task / "environment/docker-compose.yaml").write_text("services: {main: {environment: {SIDE: '1'}}}\n")
    record = await run_trial(
        TrialSpec(task_dir=task, trials_dir=tmp_path / "trials", agent="oracle", environment_type="auto")
    )
    assert (record.reward, record.environment_type) == (1.0, "docker"), record.error


async def test_a_container_that_is_killed_in_the_middle_is_a_sandbox_error(tmp_path, monkeypatch):
    monkeypatch.setenv(RUN_VARIABLE, run_id := "test-killed")

    async def kill(event: Event) -> None:
        if event == "agent-end":
            running = docker("ps", "-q", "--filter", f"label={RUN_LABEL}={run_id}").stdout.split()
            assert docker("kill", *running).returncode == 0

    record = await run(tmp_path, "#!/bin/bash\ntrue\n", on_event=kill)
    assert (record.outcome, record.reward) == (Outcome.sandbox_error, None), record.error
