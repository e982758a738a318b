"""The course of a warm-up on a family: solutions until the policy knows them, then mistakes until it is unsure.

A policy that was taught less would fail in ways that reinforcement cannot mend from 0; one that knows the solutions
but often does something else solves the share of tasks that is asked for, and every group of trials has both.
Success is measured as the likelihood of the solutions under the policy: no sampling, no noise.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from harbortrainer.errors import UserError
from harbortrainer.warmup.encoding import Encoded
from harbortrainer.warmup.supervised import Student

KNOWN = 0.98
"""Mean likelihood of the solutions at which a policy knows them."""
CHECK_EVERY = 10
RAMP = 20
MIXED_SCALE = 0.3
"""The second part's learning rate, of the first's: it ends anywhere, so it must not swing."""
MIXED_STEPS = 40
"""Steps of the second part at least, so that the mistakes are learned as one habit and not as noise."""


@dataclass(frozen=True)
class Lesson:
    """One variant: the episode that solves it, and one that does not."""

    solution: Encoded
    mistake: Encoded


@dataclass(frozen=True)
class Progress:
    """After a step: `success` is the mean likelihood of the solutions, None where it was not measured."""

    step: int
    loss: float
    success: float | None


def run_course(
    student: Student,
    lessons: Sequence[Lesson],
    *,
    steps: int,
    batch_size: int,
    success: tuple[float, float],
    rng: random.Random,
    report: Callable[[Progress], None] = lambda progress: None,
) -> float:
    """Train until the success is in the middle of `success`; returns it.

    Raises:
        UserError: `steps` did not suffice.
    """
    batches = _batches(lessons, batch_size, rng)
    low, high = success
    middle, slack = (low + high) / 2, (high - low) / 8
    mixed_since: int | None = None
    measured = 0.0
    for step in range(steps):
        batch = next(batches)
        if mixed_since is None:
            episodes = [lesson.solution for lesson in batch]
            scale = min(1.0, (step + 1) / RAMP)
        else:
            episodes = [x.solution if rng.random() < middle else x.mistake for x in batch]
            scale = MIXED_SCALE
        loss = student.step(episodes, scale=scale)
        if (step + 1) % CHECK_EVERY:
            report(Progress(step + 1, loss, None))
            continue
        measured = _mean(student.likelihood([lesson.solution for lesson in lessons[::4]]))
        report(Progress(step + 1, loss, measured))
        if mixed_since is None:
            mixed_since = step if measured >= KNOWN else None
        elif step - mixed_since >= MIXED_STEPS and abs(measured - middle) <= slack:
            return measured
    raise UserError(
        f"the warm-up's success is {measured:.2f} after {steps} steps, not between {low} and {high}",
        where="warmup.steps",
        do="give it more steps",
    )


def _batches(lessons: Sequence[Lesson], size: int, rng: random.Random) -> Iterator[list[Lesson]]:
    queue: list[Lesson] = []
    while True:
        while len(queue) < size:
            queue += rng.sample(list(lessons), len(lessons))
        yield [queue.pop() for _ in range(size)]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
