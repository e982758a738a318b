"""A reward that is not its record's stops a whole run before it trains: real model, real trials, one fault a run."""

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

pytestmark = pytest.mark.e2e

PATIENCE_S = 600
SAYS = re.compile(r"^stopped: task \S+, trial \S+: its reward is (\S+), but its record says (\S+)", re.MULTILINE)
HOW = {
    "rewards permuted": lambda reward: 1.0 - reward,  # another's, and the coin has two sides
    "rewards flipped": lambda reward: 1.0 - reward,
    "rewards rescaled": lambda reward: 2.0 * reward,
}


@contextmanager
def started(fault: str, config: Path) -> Generator[subprocess.Popen[str]]:
    """The run in a process of its own, with the fault in it."""
    command = [sys.executable, sabotage.__file__, "--play", fault, "--dtypes", "float32", "--config", str(config)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def test_a_reward_that_is_not_its_records_stops_the_run_before_it_trains(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Each fault with --all-mutations, else the first: a run takes half a minute of CPU."""
    for fault in list(REWARDS)[: None if request.config.getoption("--all-mutations") else 1]:
        folder = tmp_path / fault.replace(" ", "-")
        with started(fault, mini_run.write_run(folder, evaluates=False)) as process:
            output = process.communicate(timeout=PATIENCE_S)[0]
        assert process.returncode == 1, output
        found = SAYS.search(output)
        assert found is not None, output
        trained, recorded = map(float, found.groups())
        assert trained == HOW[fault](recorded) != recorded
        run = folder / "outputs" / "mini"
        assert not (run / "metrics.jsonl").exists()
        assert not list((run / "checkpoints").iterdir())
        assert "Traceback" not in output
