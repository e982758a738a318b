"""Checkpoints of a run: one after every step, so that a kill loses at most the current step.

Contents of `checkpoints/step_N/`:

- `adapter_model.safetensors`, `adapter_config.json`: LoRA adapter (peft)
- or `model*.safetensors`, `config.json`, tokenizer: whole model (transformers) after full fine-tuning
- `learner.pt`: optimizer, schedule, random state
- `progress.json`: other state for a resume
- `files.json`: sizes and hashes of these files

The newest two are always kept, the second as a fallback for a damaged one; `[ckpt]` decides about older ones.

Invariants: a folder named `step_N` is complete, and the highest N is the last finished step. A checkpoint with a
missing or changed byte counts as damaged. After `rewind` no line or file belongs to an unfinished step. Lines and files
of finished steps are unchanged.
"""

import hashlib
import json
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NotRequired, TypedDict

from harbortrainer.config.runfile import CkptConfig
from harbortrainer.errors import UserError
from harbortrainer.runs.durable import atomic_folder, repair
from harbortrainer.runs.folder import RunFolder
from harbortrainer.runs.transcript_files import remove_after

FILE_LIST = "files.json"


def write_file_list(folder: Path) -> None:
    """Write the sizes and hashes of a folder's files to `files.json`."""
    files = {path.name: _digest(path) for path in sorted(folder.iterdir()) if path.is_file() and path.name != FILE_LIST}
    (folder / FILE_LIST).write_text(json.dumps(files, indent=2) + "\n", encoding="utf-8")


def file_damage(folder: Path) -> str | None:
    """Describe the first damaged file of a checkpoint, or return None. Checkpoints of old releases have no list."""
    if not (folder / FILE_LIST).exists():
        return None if (folder / "progress.json").exists() else f"{FILE_LIST} is missing"
    try:
        files = dict(json.loads((folder / FILE_LIST).read_text(encoding="utf-8")))
        for name, digest in files.items():
            if not (folder / name).is_file():
                return f"{name} is missing"
            if _digest(folder / name) != digest:
                return f"{name} has changed since it was written"
    except (OSError, ValueError, TypeError, RecursionError) as error:
        return f"{getattr(error, 'filename', None) or FILE_LIST} cannot be read"
    return None


def _digest(path: Path) -> list[object]:
    with path.open("rb") as file:
        return [path.stat().st_size, hashlib.file_digest(file, "sha256").hexdigest()]


PROGRESS = "progress.json"
KEPT_NEWEST = 2
NAME = re.compile(r"step_(0|[1-9][0-9]*)")
STEP_FILE = re.compile(r"(?:eval_)?step_(\d+)\.jsonl")


class ScheduleState(TypedDict):
    """State of the task schedule."""

    drawn: dict[str, int]
    """Number of draws from each source."""
    again: Sequence[tuple[str, int]]
    """Tasks to draw first, as source and index, since their rollouts were not trained on."""
    task_rewards: NotRequired[dict[str, dict[str, float]]]
    """Mean reward of each task's latest group, by source and task key; only for sources with difficulty pools."""


@dataclass(slots=True)
class Progress:
    """State of a run after a finished step."""

    step: int = 0
    """Number of updates; also the policy version."""
    schedule: ScheduleState | None = None
    """State of the task schedule."""
    wall_s: float = 0.0
    """Seconds spent so far, over all starts."""
    warmup_s: float = 0.0
    """Seconds of `wall_s` in the warm-up."""
    train_s: float = 0.0
    """Seconds of `wall_s` spent sampling, training and evaluating."""
    peak_rss_mb: float = 0.0
    """Peak memory of the process tree so far, in MB."""
    total_tokens: int = 0
    """Tokens of all completed rollouts."""
    total_samples: int = 0
    """Number of completed rollouts."""
    cost_usd: float = 0.0
    """Cost of all steps in dollars, if prices are set."""


def steps_in(folder: Path) -> list[int]:
    """Return the steps with a folder `step_N`, intact or damaged, in ascending order."""
    matches = [NAME.fullmatch(path.name) for path in folder.glob("step_*") if path.is_dir()]
    return sorted(int(match[1]) for match in matches if match)


def newest_intact(
    folder: Path, steps: Sequence[int], damage: Callable[[Path], str | None]
) -> tuple[Path | None, dict[int, str]]:
    """Find the newest intact `step_N`.

    Args:
        folder: The folder of the checkpoints.
        steps: Steps to choose from, in ascending order.
        damage: Describes the damage of a folder; returns None if it is intact.

    Returns:
        The folder, or None if all are damaged; and the damage of each newer step, newest first.
    """
    passed_over: dict[int, str] = {}
    for step in reversed(steps):
        path = folder / f"step_{step}"
        if (what := damage(path)) is None:
            return path, passed_over
        passed_over[step] = what
    return None, passed_over


def passed_over_lines(folder: Path, passed_over: Mapping[int, str]) -> tuple[str, ...]:
    """Format a line for each damaged step that a command passed over."""
    return tuple(f"passed over {folder / f'step_{step}'}: {what}" for step, what in passed_over.items())


def save(folder: Path, write: Callable[[Path], None], progress: Progress) -> None:
    """Write the checkpoint `step_N` atomically; `write` puts the learner's files into a folder."""
    with atomic_folder(folder / f"step_{progress.step}") as fresh:
        write(fresh)
        (fresh / PROGRESS).write_text(json.dumps(asdict(progress), indent=2) + "\n", encoding="utf-8")
        write_file_list(fresh)


def latest(folder: Path) -> tuple[Path, Progress] | None:
    """Return the checkpoint of the last finished step; None if no step was finished."""
    steps = steps_in(folder)
    if not steps:
        return None
    path = folder / f"step_{steps[-1]}"
    return path, _progress(path)


def set_aside_damaged(folder: Path) -> list[str]:
    """Rename damaged newest checkpoints to `damaged_step_N` and return a line for each.

    Raises:
        UserError: All checkpoints are damaged; nothing was renamed.
    """
    intact, damaged = newest_intact(folder, steps_in(folder), checkpoint_damage)
    if damaged and intact is None:
        step, what = next(iter(damaged.items()))
        raise UserError(
            f"all checkpoints are damaged ({what})",
            where=str(folder / f"step_{step}"),
            do="restore that file, or start another run, for example from this run's model",
        )
    for step in damaged:
        shutil.rmtree(folder / f"damaged_step_{step}", ignore_errors=True)
        (folder / f"step_{step}").rename(folder / f"damaged_step_{step}")
    return [
        f"checkpoint step_{step} is damaged ({what}): set aside as damaged_step_{step}"
        for step, what in damaged.items()
    ]


def checkpoint_damage(path: Path) -> str | None:
    """Describe the damage of a checkpoint; None if it is intact."""
    what = file_damage(path)
    if what is None:
        try:
            _progress(path)
        except (OSError, ValueError, TypeError, RecursionError):
            return f"{PROGRESS} cannot be read"
    return what


def _progress(path: Path) -> Progress:
    return Progress(**json.loads((path / PROGRESS).read_text(encoding="utf-8")))


def steps_to_keep(steps: list[int], ckpt: CkptConfig | None, max_steps: int | None) -> set[int]:
    """Return the steps whose checkpoints are kept: the newest two, the last step, and those selected by `[ckpt]`."""
    chosen = {step for step in steps if step == max_steps or step in steps[-KEPT_NEWEST:]}
    if ckpt is not None and ckpt.interval is not None:
        regular = [step for step in steps if step % ckpt.interval == 0]
        chosen |= set(regular if ckpt.keep_last is None else regular[-ckpt.keep_last :])
        if ckpt.keep_interval is not None:
            chosen |= {step for step in regular if step % ckpt.keep_interval == 0}
    return chosen


def prune(folder: Path, ckpt: CkptConfig | None, max_steps: int | None) -> None:
    """Remove the checkpoints outside of `steps_to_keep`."""
    steps = steps_in(folder)
    for step in set(steps) - steps_to_keep(steps, ckpt, max_steps):
        shutil.rmtree(folder / f"step_{step}")


def rewind(run: RunFolder, step: int) -> None:
    """Remove everything that a run wrote after step `step`, and torn lines and unfinished trials."""
    repair(run.metrics_file, keep=lambda row: row["step"] <= step)
    for path in run.rollouts.glob("*.jsonl"):
        match = STEP_FILE.fullmatch(path.name)
        if match and int(match[1]) > step:
            path.unlink()
    remove_after(run.path, step)
    for path in run.trials.iterdir():
        if path.is_dir() and path.name[0] != "." and not (path / "result.json").exists():
            shutil.rmtree(path, ignore_errors=True)
