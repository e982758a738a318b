"""From `[warmup]` to a folder with a warmed-up policy: weights, tokenizer and chat template, in transformers' format.

Invariant: the folder appears whole or not at all, and a family's policy only when real trials say that its success is
where it was asked to be.
"""

import asyncio
import random
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

import torch
from transformers.utils import logging as transformers_logging

from harbortrainer.engines.local.learner.folder import atomic_folder
from harbortrainer.errors import UserError
from harbortrainer.runs.display import Display
from harbortrainer.tasks.source import load_folder
from harbortrainer.warmup import exam, family, pupil
from harbortrainer.warmup.config import WarmupConfig
from harbortrainer.warmup.course import Course, Lesson
from harbortrainer.warmup.encoding import Encoded
from harbortrainer.warmup.family import Variant
from harbortrainer.warmup.pupil import Pupil
from harbortrainer.warmup.replay import replay
from harbortrainer.warmup.supervised import Student
from harbortrainer.warmup.transcripts import Pace, Transcript, transcript

LATE = 0.2
"""Share of the screens that are read before the shell's prompt is there."""
SLACK = 0.01
"""How near the middle of `success` the likelihood of the solutions must be, so that a sample of trials stays inside."""
EXAMS = 3
"""Exams before it is given up; between two the course goes on, corrected by what the last one found."""


def warm_up(config: WarmupConfig, out_dir: Path, *, seed: int = 0, display: Display | None = None) -> Path:
    """Make a policy and save it to `out_dir`, which it returns.

    With `family` the mean reward of the policy, measured in real trials, is in `config.success`. With `tasks` it has
    seen the replayed solutions for `config.steps` steps, and nothing is promised.

    Raises:
        UserError: A file, folder or model is not what it should be, or the success could not be reached.
    """
    if not torch.cuda.is_available():
        # The other cores import the environment's workers meanwhile; spinning threads would take them away.
        torch.set_num_threads(1)
    transformers_logging.disable_progress_bar()  # it would draw over the run's own bars
    display = display or Display()
    with atomic_folder(out_dir) as folder:
        if config.family is not None:
            _learn_family(config, config.family, folder, seed, display)
        else:
            _learn_tasks(config, folder, seed, display)
    return out_dir


def _learn_family(config: WarmupConfig, file: Path, folder: Path, seed: int, display: Display) -> None:
    rng = random.Random(seed)
    variants = family.learnable(file, config.heldout)
    episodes = [_episode(variant, variant.commands, rng) for variant in variants]
    start = pupil.load(config.model) if config.model else pupil.fresh(episodes, seed=seed)
    lessons = [
        Lesson(_only(start, episode), _only(start, _episode(variant, variant.mistake(rng), rng)))
        for variant, episode in zip(variants, episodes, strict=True)
    ]
    student = Student(start.model, lr=config.lr, pad=start.tokenizer.pad_token_id)
    low, high = config.success
    course = Course(student, lessons, batch_size=config.batch_size, target=(low + high) / 2, seed=seed)
    for attempt in range(EXAMS):
        with display.bar("warm-up: supervised steps", config.steps) as bar:
            mark = course.attend(config.steps, slack=SLACK, report=lambda mark, bar=bar: bar.set(mark.step))
        _save(student, start, folder)
        mean, told = _examine(config, folder, rng.sample(variants, k=min(config.trials, len(variants))), seed + attempt)
        display.line(f"warm-up: {mark.step} steps, likelihood of the solutions {mark.success:.2f}{told}")
        if mean is None or low <= mean <= high:
            return
        course.target += (low + high) / 2 - mean
    raise UserError(
        f"the policy's success stays outside {low} to {high}",
        where="warmup.success",
        do="widen it, or raise warmup.trials: few trials measure badly",
    )


def _episode(variant: Variant, commands: Sequence[str], rng: random.Random) -> Transcript:
    paces: list[Pace] = ["late" if rng.random() < LATE else "ready" for _ in range(2)]
    key = family.task_key(variant.instruction)
    return transcript(key, variant.instruction, commands, (paces[0], paces[1]))


def _only(start: Pupil, episode: Transcript) -> Encoded:
    (sequence,) = start.encode(episode)
    return sequence


def _examine(config: WarmupConfig, folder: Path, variants: Sequence[Variant], seed: int) -> tuple[float | None, str]:
    """The mean reward in real trials, None when none are wanted, and a sentence about it."""
    if not variants:
        return None, ""
    rewards = exam.examine(folder, variants, seed=seed, environment_type=config.environment_type)
    if 2 * len(rewards) < len(variants):
        raise UserError(
            f"only {len(rewards)} of {len(variants)} trials of the warm-up's exam could be graded",
            where="warmup.environment_type",
            do="run `harbortrainer doctor`",
        )
    mean = fmean(rewards)
    return mean, f", mean reward {mean:.2f} in {len(rewards)} real trials"


def _learn_tasks(config: WarmupConfig, folder: Path, seed: int, display: Display) -> None:
    assert config.tasks is not None
    tasks = load_folder(config.tasks)
    given = pupil.load(config.model) if config.model else None
    with display.bar("warm-up: replaying solutions", len(tasks)) as bar:
        found = asyncio.run(
            replay(
                tasks,
                environment_type=config.environment_type,
                work_dir=folder,
                report=lambda task, kept: bar.advance(),
            )
        )
    if not found:
        raise UserError(
            "no solution reaches the top reward when it is typed into a terminal",
            where=str(config.tasks),
            do="run `harbortrainer tasks check` on it",
        )
    start = given or pupil.fresh(found, seed=seed)
    sequences = [sequence for episode in found for sequence in start.encode(episode)]
    student = Student(start.model, lr=config.lr, pad=start.tokenizer.pad_token_id, lora_rank=config.lora_rank)
    rng = random.Random(seed)
    with display.bar("warm-up: supervised steps", config.steps) as bar:
        for step in range(config.steps):
            batch = rng.choices(sequences, k=config.batch_size)
            loss = student.step(batch, scale=1 - step / config.steps)
            bar.advance()
    display.line(f"warm-up: {len(found)} of {len(tasks)} solutions, {config.steps} steps, loss {loss:.3f}")
    _save(student, start, folder)


def _save(student: Student, start: Pupil, folder: Path) -> None:
    student.finished().save_pretrained(folder)
    start.tokenizer.save_pretrained(folder)
