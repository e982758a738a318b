"""Outcomes in real containers, where Harbor mounts the verifier's folder from the host."""

import logging
from pathlib import Path

import pytest
from fakes import SOLVED, make_task
from test_docker import docker

from harbortrainer.runs.label import RUN_LABEL, RUN_VARIABLE
from harbortrainer.trials import Outcome, TrialRecord, TrialSpec, run_trial
from harbortrainer.trials.hooks import Event

DOCKER_SANDBOX = "harbortrainer.sandbox.docker_environment:DockerSandbox"

pytestmark = [pytest.mark.docker, pytest.mark.e2e, pytest.mark.usefixtures("container")]

FORGERY = """#!/bin/bash
echo 1 > /logs/verifier/reward.txt
ln -s /etc/hostname /logs/verifier/reward.json
mkdir -p /logs/verifier/deep/er /tests
touch /logs/verifier/deep/er/file /tests/conftest.py
echo 'echo 1 > /logs/verifier/reward.txt' > /tests/test.sh
"""


async def run(
    folder: Path, solution: str, test: str = SOLVED, files: dict[str, str] | None = None, **more
) -> TrialRecord:
    """Run one trial with the oracle agent, which executes `solution`, of a task with further files."""
    task = make_task(folder / "task", test=test)
    for name, text in (files or {}).items():
        (task / name).write_text(text)
    (task / "solution" / "solve.sh").write_text(solution)
    spec = TrialSpec(task_dir=task, trials_dir=folder / "trials", agent="oracle", environment_type=DOCKER_SANDBOX)
    return await run_trial(spec, **more)


async def test_forged_reward_in_container_does_not_count(tmp_path, caplog):
    caplog.set_level(logging.DEBUG)
    record = await run(tmp_path, FORGERY, f"ls -A /tests > /logs/verifier/listing; {SOLVED}")
    assert (record.outcome, record.reward) == (Outcome.completed, 0.0)
    assert record.trial_dir is not None
    written = {path.name for path in (Path(record.trial_dir) / "verifier").iterdir()}
    assert written == {"reward.txt", "listing", "test-stdout.txt"}
    assert (Path(record.trial_dir) / "verifier" / "listing").read_text().split() == ["test.sh"]
    assert "using Compose" not in caplog.text  # a slower start, for what the daemon's API does not take


async def test_auto_selects_docker_for_task_unsupported_by_local(tmp_path):
    task = make_task(tmp_path / "task")
    (task / "environment/docker-compose.yaml").write_text("services: {main: {environment: {SIDE: '1'}}}\n")
    record = await run_trial(
        TrialSpec(task_dir=task, trials_dir=tmp_path / "trials", agent="oracle", environment_type="auto")
    )
    assert (record.reward, record.environment_type) == (1.0, "docker"), record.error


async def test_container_killed_during_trial_is_sandbox_error(tmp_path, monkeypatch):
    monkeypatch.setenv(RUN_VARIABLE, run_id := "test-killed")

    async def kill(event: Event) -> None:
        if event == "agent-end":
            running = docker("ps", "-q", "--filter", f"label={RUN_LABEL}={run_id}").stdout.split()
            assert docker("kill", *running).returncode == 0

    record = await run(tmp_path, "#!/bin/bash\ntrue\n", on_event=kill)
    assert (record.outcome, record.reward) == (Outcome.sandbox_error, None), record.error


async def test_removed_tests_are_restored_where_harborignore_leaves_out_a_file(tmp_path: Path) -> None:
    """Harbor 0.25 uploads a filtered copy of the tests, which it then deletes."""
    remove = "(until [ -e /tests/test.sh ]; do :; done; rm -f /tests/test.sh) > /dev/null 2>&1 &"
    record = await run(
        tmp_path,
        remove,
        "echo 0.25 > /logs/verifier/reward.txt",
        files={"tests/.harborignore": "notes\n", "tests/notes": ""},
    )
    assert (record.outcome, record.reward) == (Outcome.completed, 0.25), record
