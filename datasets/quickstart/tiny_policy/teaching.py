"""From a family to the folder of a policy that solves as much of it as was asked for.

Invariant: a policy is only given when real trials say that its success is where it was asked to be.
"""

import random
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

from harbortrainer.config.warmup_table import WarmupConfig
from harbortrainer.errors import UserError
from harbortrainer.runs.display import Display
from harbortrainer.warmup.demonstrations import Demonstration
from harbortrainer.warmup.encoding import Encoded
from harbortrainer.warmup.starting_policy import StartingPolicy, load_policy
from harbortrainer.warmup.supervised import SupervisedTrainer
from tiny_policy import exam
from tiny_policy.architecture import fresh_policy
from tiny_policy.curriculum import Curriculum, Lesson
from tiny_policy.prompts import Pace, episode
from tiny_policy.variants import Variant, learnable

LATE = 0.2
"""Share of the screens that are read before the shell's prompt is there."""
SLACK = 0.01
"""How near the middle of `success` the likelihood of the solutions must be, so that a sample of trials stays inside."""
EXAMS = 3
"""Exams before it is given up; between two the curriculum goes on, corrected by what the last one found."""


def teach_family(
    variants: Sequence[Variant], config: WarmupConfig, folder: Path, *, seed: int, display: Display
) -> None:
    """Teach `config.model`, or a fresh tiny policy, the variants that are not held out; write it to `folder`.

    Raises:
        UserError: The model cannot be loaded, or `config.success` could not be reached.
    """
    rng = random.Random(seed)
    variants = learnable(variants, config.heldout)
    solutions = [_episode(variant, variant.commands, rng) for variant in variants]
    start = load_policy(config.model) if config.model else fresh_policy(solutions, seed=seed)
    lessons = [
        Lesson(_only(start, solution), _only(start, _episode(variant, variant.mistake(rng), rng)))
        for variant, solution in zip(variants, solutions, strict=True)
    ]
    trainer = SupervisedTrainer(start, lr=config.lr)
    low, high = config.success
    curriculum = Curriculum(trainer, lessons, batch_size=config.batch_size, target=(low + high) / 2, seed=seed)
    for attempt in range(EXAMS):
        with display.bar("warm-up: supervised steps", config.steps) as bar:
            mark = curriculum.teach(config.steps, slack=SLACK, report=lambda mark, bar=bar: bar.set(mark.step))
        trainer.save(folder)
        mean, told = _examine(config, folder, rng.sample(variants, k=min(config.trials, len(variants))), seed + attempt)
        display.line(f"warm-up: {mark.step} steps, likelihood of the solutions {mark.success:.2f}{told}")
        if mean is None or low <= mean <= high:
            return
        curriculum.target += (low + high) / 2 - mean
    raise UserError(
        f"the policy's success stays outside {low} to {high}",
        where="warmup.success",
        do="widen it, or raise warmup.trials: few trials measure badly",
    )


def _episode(variant: Variant, commands: Sequence[str], rng: random.Random) -> Demonstration:
    paces: list[Pace] = ["late" if rng.random() < LATE else "ready" for _ in range(2)]
    return episode(variant.instruction, commands, (paces[0], paces[1]))


def _only(start: StartingPolicy, demonstration: Demonstration) -> Encoded:
    (sequence,) = start.encode(demonstration)
    return sequence


def _examine(config: WarmupConfig, folder: Path, variants: Sequence[Variant], seed: int) -> tuple[float | None, str]:
    """The mean reward in real trials, None when none are wanted, and a sentence about it."""
    if not variants:
        return None, ""
    rewards, failure = exam.examine(
        folder,
        variants,
        seed=seed,
        environment_type=config.environment_type,
        environment_kwargs=config.environment_kwargs,
    )
    if 2 * len(rewards) < len(variants):
        raise UserError(
            f"only {len(rewards)} of {len(variants)} trials of the warm-up's exam could be graded ({failure})",
            where="warmup.environment_type",
            do="run `harbortrainer doctor`",
        )
    mean = fmean(rewards)
    return mean, f", mean reward {mean:.2f} in {len(rewards)} real trials"
