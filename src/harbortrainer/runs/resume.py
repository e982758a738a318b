"""Bringing a run folder back to the end of its last finished step.

Invariant: afterwards no line and no file speaks of a step that was not finished, and every line and file of a
finished step is as it was. Evaluations belong to the policy version they measured.
"""

import re
import shutil

from harbortrainer.runs.durable import repair
from harbortrainer.runs.folder import RunFolder

STEP_FILE = re.compile(r"(?:eval_)?step_(\d+)\.jsonl")


def rewind(run: RunFolder, step: int) -> None:
    """Forget what a run wrote after step `step`, torn lines and unfinished trials included."""
    repair(run.metrics_file, keep=lambda row: row["step"] <= step)
    for path in run.rollouts.glob("*.jsonl"):
        match = STEP_FILE.fullmatch(path.name)
        if match and int(match[1]) > step:
            path.unlink()
    drop_unfinished_trials(run)


def drop_unfinished_trials(run: RunFolder) -> int:
    """Remove the folders of trials that never came to a result. Returns how many there were."""
    unfinished = [
        path
        for path in run.trials.iterdir()
        if path.is_dir() and path.name[0] != "." and not (path / "result.json").exists()
    ]
    for path in unfinished:
        shutil.rmtree(path, ignore_errors=True)
    return len(unfinished)
