"""A reward that differs from its trial's record stops a run before training: real model and trials, one fault a run."""

import json
import re
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import mini_run
import pytest
import sabotages
from sabotages import REWARDS

pytestmark = [pytest.mark.e2e, pytest.mark.long]

PATIENCE_S = 600
"""Longest time of a run."""
STOPPED = re.compile(r"^stopped: task \S+, trial \S+: its reward is (\S+), but its record says (\S+)", re.MULTILINE)
WRONG_REWARD = {
    "rewards permuted": lambda reward: 1.0 - reward,  # the reward of another trial; rewards are 0 or 1
    "rewards flipped": lambda reward: 1.0 - reward,
    "rewards rescaled": lambda reward: 2.0 * reward,
}


PLAY_EACH = """
import contextlib, json, sys, sabotage
from pathlib import Path
for fault, folder in json.loads(sys.argv[1]).items():
    with open(f"{folder}/output", "w") as output:
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
            code = sabotage.play(fault, "float32", Path(folder, "mini.toml"))
    Path(folder, "code").write_text(str(code))
"""


@dataclass(frozen=True)
class FaultyRun:
    """A run with one fault: what it printed, its exit code, and its run folder."""

    output: str
    code: int
    folder: Path


def play_each(faults: Iterable[str], base: Path, *, steps: int) -> dict[str, FaultyRun]:
    """Play a run with each fault, one after the other in one process, which imports torch once."""
    folders = {fault: base / str(number) for number, fault in enumerate(faults)}
    for folder in folders.values():
        mini_run.write_run(folder, steps=steps, evaluates=False)
    command = [sys.executable, "-c", PLAY_EACH, json.dumps({fault: str(folder) for fault, folder in folders.items()})]
    done = subprocess.run(
        command, env=mini_run.ENVIRONMENT | {"PYTHONPATH": str(Path(sabotages.__file__).parent)},
        capture_output=True, text=True, timeout=PATIENCE_S * len(folders), check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return {
        fault: FaultyRun(
            (folder / "output").read_text(), int((folder / "code").read_text()), folder / "outputs" / "mini"
        )
        for fault, folder in folders.items()
    }


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, FaultyRun]:
    return play_each(REWARDS, tmp_path_factory.mktemp("runs"), steps=2)


@pytest.mark.parametrize("fault", REWARDS)
def test_reward_that_differs_from_record_stops_run_before_training(runs: dict[str, FaultyRun], fault: str) -> None:
    run = runs[fault]
    assert run.code == 1, run.output
    stopped = STOPPED.search(run.output)
    assert stopped is not None, run.output
    trained, recorded = map(float, stopped.groups())
    assert trained == WRONG_REWARD[fault](recorded) != recorded
    assert not (run.folder / "metrics.jsonl").exists()
    assert not list((run.folder / "checkpoints").iterdir())
    assert "Traceback" not in run.output
