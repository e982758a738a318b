"""Checkpoints: one after every step, so that a kill costs at most the step it hits.

    checkpoints/step_N/   adapter_model.safetensors, adapter_config.json   plain peft
                          learner.pt                                        optimizer, schedule, random state
                          progress.json                                     what else a resume needs

A LoRA is small, so the newest step is always kept; older ones are kept by `[ckpt]`. Invariant: a folder named
`step_N` is complete, and the highest N is the last finished step.
"""

import json
import re
import shutil
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

from harbortrainer.config.runfile import CkptConfig
from harbortrainer.engines.local.learner.folder import atomic_folder

NAME = re.compile(r"step_(\d+)")


class Saves(Protocol):
    """What has a state to save: the learner."""

    def save(self, folder: Path) -> None: ...


@dataclass(slots=True)
class Progress:
    """Where a run stands after a finished step."""

    step: int = 0
    """Updates made; also the policy version."""
    schedule: dict[str, Any] = field(default_factory=dict)
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


def steps_in(folder: Path) -> list[int]:
    """The steps that have a checkpoint, ascending."""
    if not folder.is_dir():
        return []
    found = (NAME.fullmatch(path.name) for path in folder.iterdir() if (path / "progress.json").is_file())
    return sorted(int(match[1]) for match in found if match)


def save(folder: Path, learner: Saves, progress: Progress) -> None:
    """Write `step_N`, whole."""
    with atomic_folder(folder / f"step_{progress.step}") as fresh:
        learner.save(fresh)
        (fresh / "progress.json").write_text(json.dumps(asdict(progress), indent=2) + "\n", encoding="utf-8")


def latest(folder: Path) -> tuple[Path, Progress] | None:
    """The checkpoint of the last finished step; None when no step was finished."""
    steps = steps_in(folder)
    if not steps:
        return None
    path = folder / f"step_{steps[-1]}"
    return path, Progress(**json.loads((path / "progress.json").read_text(encoding="utf-8")))


def kept(steps: list[int], ckpt: CkptConfig | None, max_steps: int | None) -> set[int]:
    """Which checkpoints stay: the newest, the last step's, and those that `[ckpt]` asks for."""
    if not steps:
        return set()
    chosen = {step for step in steps if step == max_steps}
    if ckpt is not None and ckpt.interval is not None:
        regular = [step for step in steps if step % ckpt.interval == 0]
        chosen |= set(regular if ckpt.keep_last is None else regular[-ckpt.keep_last :])
        if ckpt.keep_interval is not None:
            chosen |= {step for step in regular if step % ckpt.keep_interval == 0}
    return chosen | {steps[-1]}


def prune(folder: Path, ckpt: CkptConfig | None, max_steps: int | None) -> None:
    """Remove the checkpoints that are not kept."""
    steps = steps_in(folder)
    for step in set(steps) - kept(steps, ckpt, max_steps):
        shutil.rmtree(folder / f"step_{step}")
