"""Where a run stands: a checkpoint after every step, so that a kill costs at most the step it hits.

    checkpoints/step_N/   adapter_model.safetensors, adapter_config.json   plain peft
                          or model*.safetensors, config.json, tokenizer     plain transformers, where all is trained
                          learner.pt                                        optimizer, schedule, random state
                          progress.json                                     what else a resume needs
                          files.json                                        sizes and hashes of these

The newest two are always kept, the second for the day on which the first cannot be read; older ones by `[ckpt]`.
Invariant: a folder named `step_N` is complete, and the highest N is the last finished step. After `rewind` no line and
no file speaks of a step that was not finished, and every line and file of a finished step is as it was.
"""

import json
import re
import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NotRequired, TypedDict

from harbortrainer.config.runfile import CkptConfig
from harbortrainer.errors import UserError
from harbortrainer.runs.checkpoint_files import damage, list_files
from harbortrainer.runs.durable import atomic_folder, repair
from harbortrainer.runs.folder import RunFolder
from harbortrainer.runs.transcript_files import forget_after

PROGRESS = "progress.json"
NEWEST = 2
NAME = re.compile(r"step_(\d+)")
STEP_FILE = re.compile(r"(?:eval_)?step_(\d+)\.jsonl")


class ScheduleState(TypedDict):
    """Where the schedule of tasks stands."""

    drawn: dict[str, int]
    """How often each source was drawn."""
    again: Sequence[tuple[str, int]]
    """Tasks that come first, each as source and index: their rollouts had not trained."""
    task_rewards: NotRequired[dict[str, dict[str, float]]]
    """Of each source with difficulty pools: the mean reward of every task's latest group, by the task's key."""


@dataclass(slots=True)
class Progress:
    """Where a run stands after a finished step."""

    step: int = 0
    """Updates made; also the policy version."""
    schedule: ScheduleState | None = None
    """State of the task schedule."""
    wall_s: float = 0.0
    """Seconds spent so far, over every start."""
    warmup_s: float = 0.0
    """Seconds of them spent making the policy."""
    train_s: float = 0.0
    """Seconds of them spent sampling, training and evaluating."""
    peak_rss_mb: float = 0.0
    """Largest memory of the process tree so far."""
    total_tokens: int = 0
    """Tokens of every rollout that arrived."""
    total_samples: int = 0
    """Rollouts that arrived."""
    cost_usd: float = 0.0
    """Dollars of every step, where prices are set."""


def steps_in(folder: Path) -> list[int]:
    """The steps that have a checkpoint, ascending, whole or damaged."""
    matches = [NAME.fullmatch(path.parent.name) for path in folder.glob("*/*.json")]
    return sorted({int(match[1]) for match in matches if match})


def save(folder: Path, write: Callable[[Path], None], progress: Progress) -> None:
    """Write `step_N`, whole; `write` puts the learner's files into a folder."""
    with atomic_folder(folder / f"step_{progress.step}") as fresh:
        write(fresh)
        (fresh / PROGRESS).write_text(json.dumps(asdict(progress), indent=2) + "\n", encoding="utf-8")
        list_files(fresh)


def latest(folder: Path) -> tuple[Path, Progress] | None:
    """The checkpoint of the last finished step; None when no step was finished."""
    steps = steps_in(folder)
    if not steps:
        return None
    path = folder / f"step_{steps[-1]}"
    return path, _progress(path)


def set_damaged_aside(folder: Path) -> list[str]:
    """Rename the newest checkpoints to `damaged_step_N` until the newest is a good one. Returns a line for each.

    Raises:
        UserError: There are checkpoints and none of them is good; nothing was renamed.
    """
    found: list[tuple[int, str]] = []
    steps = steps_in(folder)
    while steps and (what := wrong_with(folder / f"step_{steps[-1]}")):
        found.append((steps.pop(), what))
    if found and not steps:
        raise UserError(
            f"no checkpoint is whole ({found[0][1]})",
            where=str(folder / f"step_{found[0][0]}"),
            do="put that file back, or start another run; it may begin with this run's model",
        )
    for step, _ in found:
        shutil.rmtree(folder / f"damaged_step_{step}", ignore_errors=True)
        (folder / f"step_{step}").rename(folder / f"damaged_step_{step}")
    return [f"checkpoint step_{step} is damaged ({what}): set aside as damaged_step_{step}" for step, what in found]


def wrong_with(path: Path) -> str | None:
    """What is wrong with a checkpoint, in words; None for a good one."""
    what = damage(path)
    if what is None:
        try:
            _progress(path)
        except (OSError, ValueError, TypeError):
            return f"{PROGRESS} cannot be read"
    return what


def _progress(path: Path) -> Progress:
    return Progress(**json.loads((path / PROGRESS).read_text(encoding="utf-8")))


def kept(steps: list[int], ckpt: CkptConfig | None, max_steps: int | None) -> set[int]:
    """Which checkpoints stay: the newest two, the last step's, and those that `[ckpt]` asks for."""
    chosen = {step for step in steps if step == max_steps or step in steps[-NEWEST:]}
    if ckpt is not None and ckpt.interval is not None:
        regular = [step for step in steps if step % ckpt.interval == 0]
        chosen |= set(regular if ckpt.keep_last is None else regular[-ckpt.keep_last :])
        if ckpt.keep_interval is not None:
            chosen |= {step for step in regular if step % ckpt.keep_interval == 0}
    return chosen


def prune(folder: Path, ckpt: CkptConfig | None, max_steps: int | None) -> None:
    """Remove the checkpoints that are not kept."""
    steps = steps_in(folder)
    for step in set(steps) - kept(steps, ckpt, max_steps):
        shutil.rmtree(folder / f"step_{step}")


def rewind(run: RunFolder, step: int) -> None:
    """Forget what a run wrote after step `step`, torn lines and unfinished trials included."""
    repair(run.metrics_file, keep=lambda row: row["step"] <= step)
    for path in run.rollouts.glob("*.jsonl"):
        match = STEP_FILE.fullmatch(path.name)
        if match and int(match[1]) > step:
            path.unlink()
    forget_after(run.path, step)
    for path in run.trials.iterdir():
        if path.is_dir() and path.name[0] != "." and not (path / "result.json").exists():
            shutil.rmtree(path, ignore_errors=True)
