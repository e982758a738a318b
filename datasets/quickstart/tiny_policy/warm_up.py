"""Make a policy that solves the wanted share of a family's tasks.

Invariant: a policy is returned only if its mean reward in real trials agrees with `success`, up to one standard error.
"""

import math
import random
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

from harbortrainer.config.run_sections import WarmupConfig
from harbortrainer.errors import UserError
from harbortrainer.runs.display import Display
from harbortrainer.warmup.demonstrations import Demonstration
from harbortrainer.warmup.encoding import Encoded
from harbortrainer.warmup.sampled_trials import measure_rewards
from harbortrainer.warmup.supervised import BasePolicy, SupervisedTrainer, load_policy
from tiny_policy.architecture import fresh_policy
from tiny_policy.curriculum import Curriculum, Example
from tiny_policy.prompts import Pace, episode
from tiny_policy.variants import Variant, learnable

LATE_SHARE = 0.2
"""Share of the screens that are read before the shell has printed its prompt."""
TOLERANCE = 0.01
"""Maximum difference between the likelihood of the solutions and its target."""
MAX_TURNS, MAX_LENGTH = 3, 512
"""Turns and tokens of a real trial, as in configs/quickstart.toml."""
MEASUREMENTS = 3
"""Maximum number of measurements in real trials. Training continues between them, with a corrected target."""


def make_policy(
    variants: Sequence[Variant], config: WarmupConfig, folder: Path, *, seed: int, display: Display
) -> None:
    """Train `config.model`, or a fresh tiny policy, on the variants that are not held out; write it to `folder`.

    Raises:
        UserError: The model cannot be loaded, or `config.success` was not reached.
    """
    rng = random.Random(seed)
    variants = learnable(variants, config.heldout)
    solutions = [_episode(variant, variant.commands, rng) for variant in variants]
    start = load_policy(config.model) if config.model else fresh_policy(solutions, seed=seed)
    examples = [
        Example(_encode(start, solution), _encode(start, _episode(variant, variant.mistake(rng), rng)))
        for variant, solution in zip(variants, solutions, strict=True)
    ]
    trainer = SupervisedTrainer(start, lr=config.lr)
    low, high = config.success
    middle = (low + high) / 2
    curriculum = Curriculum(trainer, examples, batch_size=config.batch_size, target=middle, seed=seed)
    for attempt in range(MEASUREMENTS):
        with display.bar("warm-up: supervised steps", config.steps) as bar:
            state = curriculum.train(
                config.steps, tolerance=TOLERANCE, report=lambda progress, bar=bar: bar.set(progress.step)
            )
        trainer.save(folder)
        line = f"warm-up: {state.step} steps, likelihood of the solutions {state.success:.2f}"
        sample = rng.sample(variants, k=min(config.trials, len(variants)))
        if not sample:
            display.line(line)
            return
        rewards = measure_rewards(
            folder,
            lambda place, sample=sample: [variant.write(place) for variant in sample],
            config,
            seed=seed + attempt,
            max_turns=MAX_TURNS,
            max_length=MAX_LENGTH,
        )
        mean = fmean(rewards)
        display.line(f"{line}, mean reward {mean:.2f} in {len(rewards)} real trials")
        if is_within(mean, len(rewards), config.success):
            return
        curriculum.target += (middle - mean) / 2  # half of the difference: the mean is noisy
    raise UserError(
        f"the mean reward of the policy stays outside {low} to {high}",
        where="warmup.success",
        do="use a wider range, or more trials in warmup.trials for a smaller error",
    )


def is_within(mean: float, trials: int, success: tuple[float, float]) -> bool:
    """Whether a mean reward lies in the range `success`, up to one standard error."""
    error = math.sqrt(mean * (1 - mean) / trials)
    return success[0] - error <= mean <= success[1] + error


def _episode(variant: Variant, commands: Sequence[str], rng: random.Random) -> Demonstration:
    paces: list[Pace] = ["late" if rng.random() < LATE_SHARE else "ready" for _ in range(2)]
    return episode(variant.instruction, commands, (paces[0], paces[1]))


def _encode(policy: BasePolicy, demonstration: Demonstration) -> Encoded:
    (sequence,) = policy.encode(demonstration)
    return sequence
