"""Outcomes in real containers, where Harbor mounts the verifier's folder from the host."""

from pathlib import Path

import pytest
from fakes import SOLVED, make_task
from test_docker import REASON, docker

from harbortrainer.sandbox.docker import RUN_LABEL, RUN_VARIABLE
from harbortrainer.trials import Outcome, TrialRecord, TrialSpec, run_trial
from harbortrainer.trials.hooks import Event

LABELLED = "harbortrainer.sandbox.docker:LabelledDocker"

pytestmark = [pytest.mark.docker, pytest.mark.e2e, pytest.mark.skipif(bool(REASON), reason=REASON)]

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


async def test_a_container_that_is_killed_in_the_middle_is_a_sandbox_error(tmp_path, monkeypatch):
    monkeypatch.setenv(RUN_VARIABLE, run_id := "test-killed")

    async def kill(event: Event) -> None:
        if event == "agent-end":
            running = docker("ps", "-q", "--filter", f"label={RUN_LABEL}={run_id}").stdout.split()
            assert docker("kill", *running).returncode == 0

    record = await run(tmp_path, "#!/bin/bash\ntrue\n", on_event=kill)
    assert (record.outcome, record.reward) == (Outcome.sandbox_error, None), record.error
