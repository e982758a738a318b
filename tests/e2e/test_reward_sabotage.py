"""A reward that differs from its trial's record stops a run before training: real model and trials, one fault a run."""

import re
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import mini_run
import pytest
import sabotage
from sabotages import REWARDS

pytestmark = [pytest.mark.e2e, pytest.mark.long]

PATIENCE_S = 600
STOPPED = re.compile(r"^stopped: task \S+, trial \S+: its reward is (\S+), but its record says (\S+)", re.MULTILINE)
WRONG_REWARD = {
    "rewards permuted": lambda reward: 1.0 - reward,  # the reward of another trial; rewards are 0 or 1
    "rewards flipped": lambda reward: 1.0 - reward,
    "rewards rescaled": lambda reward: 2.0 * reward,
}


@contextmanager
def run_with_fault(fault: str, config: Path) -> Generator[subprocess.Popen[str]]:
    """Start the run with the fault in a separate process, and kill it at the end."""
    command = [sys.executable, sabotage.__file__, "--play", fault, "--dtypes", "float32", "--config", str(config)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize("fault", REWARDS)
def test_reward_that_differs_from_record_stops_run_before_training(tmp_path: Path, fault: str) -> None:
    with run_with_fault(fault, mini_run.write_run(tmp_path, evaluates=False)) as process:
        output = process.communicate(timeout=PATIENCE_S)[0]
    assert process.returncode == 1, output
    stopped = STOPPED.search(output)
    assert stopped is not None, output
    trained, recorded = map(float, stopped.groups())
    assert trained == WRONG_REWARD[fault](recorded) != recorded
    run = tmp_path / "outputs" / "mini"
    assert not (run / "metrics.jsonl").exists()
    assert not list((run / "checkpoints").iterdir())
    assert "Traceback" not in output
