"""A process that the agent left running and that opens the reward in a container is named. Real trials."""

import os
from pathlib import Path

import pytest
from fakes import make_task
from reward_attacks import FORGED, LEFTOVERS, LEFTOVERS_TEST, leftover

from harbortrainer.trials import Outcome, TrialRecord, TrialSpec, run_trial

pytestmark = [
    pytest.mark.docker,
    pytest.mark.e2e,
    pytest.mark.long,
    pytest.mark.skipif(os.geteuid() != 0, reason="only root may watch files of other users' processes"),
]


async def play(folder: Path, solution: str, test: str) -> TrialRecord:
    """Run a trial in Docker; return its record."""
    task = make_task(folder / "task", test=test, verifier_timeout_s=30)
    (task / "solution" / "solve.sh").write_text(f"#!/bin/bash\n{solution}\n")
    spec = TrialSpec(task_dir=task, trials_dir=folder / "trials", agent="oracle", environment_type="docker")
    return await run_trial(spec)


@pytest.mark.parametrize("case", LEFTOVERS)
async def test_forged_reward_is_named(tmp_path: Path, case: str):
    record = await play(tmp_path, leftover(LEFTOVERS[case]), LEFTOVERS_TEST)
    assert record.reward != 1.0 or record.changed_tools, record


@pytest.mark.parametrize(
    "open_reward",
    [
        FORGED,
        "cp /forged /logs/verifier/reward.txt",
        'echo "{\\"reward\\": 1}" > /proc/1/root/logs/verifier/reward.json',
    ],
)
async def test_process_that_waits_for_the_reward_is_named(tmp_path: Path, open_reward: str):
    waits = f"echo 1 > /forged; until [ -s /logs/verifier/reward.txt ]; do :; done; {open_reward}"
    record = await play(tmp_path, leftover(waits), LEFTOVERS_TEST)
    assert record.outcome is Outcome.completed
    assert any("which the agent left running" in tool for tool in record.changed_tools), record


HONEST = {
    "a child of a child": "(setsid bash -c 'echo 1 > /logs/verifier/reward.txt') & wait",
    "a program": "echo 1 > /r; cp /r /logs/verifier/reward.txt; cat /logs/verifier/reward.txt",
    "a rename": "echo 1 > /logs/verifier/r; mv /logs/verifier/r /logs/verifier/reward.txt",
    "another user": "chmod 777 /logs/verifier; su nobody -s /bin/bash -c 'echo 1 > /logs/verifier/reward.txt'",
}


@pytest.mark.parametrize("case", HONEST)
async def test_verifier_beside_a_service_is_not_named(tmp_path: Path, case: str):
    service = (
        "while :; do cat /app/* /logs/agent/* > /dev/null 2>&1; ls /logs/verifier; echo x > /logs/verifier/log; done"
    )
    record = await play(tmp_path, leftover(service), HONEST[case])
    assert (record.outcome, record.reward, record.changed_tools) == (Outcome.completed, 1.0, []), record


async def test_no_device_in_the_verifiers_folder_is_opened(tmp_path: Path):
    """The watch has the kernel open each file for it: a device would be opened on this machine."""
    test = (
        "mknod /logs/verifier/reward.txt c 1 7; cat /logs/verifier/reward.txt 2>&1; "
        "rm /logs/verifier/reward.txt; echo 1 > /logs/verifier/reward.txt"
    )
    record = await play(tmp_path, "true", test)
    assert (record.outcome, record.reward, record.changed_tools) == (Outcome.completed, 1.0, []), record
    assert "Permission denied" in record.verifier_output
