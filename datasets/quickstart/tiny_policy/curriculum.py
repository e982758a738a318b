"""The curriculum of the tiny policy: solutions until it knows them, then mistakes until it is unsure.

A policy that was taught less fails in ways that reinforcement cannot mend from 0; one that knows the solutions but
often does something else solves the share of tasks that is asked for, and most groups of trials hold both. Success
is measured as the likelihood of the solutions under the policy: no sampling, no noise.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from harbortrainer.errors import UserError
from harbortrainer.warmup.encoding import Encoded

KNOWN = 0.98
"""Mean likelihood of the solutions at which a policy knows them."""
CHECK_EVERY = 10
RAMP = 20
"""Steps in which the learning rate rises to its peak."""
UNSURE_STEPS = 60
"""Steps of the second part at least, so that the mistakes become a habit that reinforcement can find and break."""
UNSURE_SCALES = (0.3, 0.1)
"""The second part's learning rate, of the peak: falling over those steps, since any later one may be the last."""
LIFT = 0.03
"""Added to the share of solutions in the second part, which nears that share from below and would take long to end."""


@dataclass(frozen=True)
class Lesson:
    """One task: the sequence that solves it, and one that does not."""

    solution: Encoded
    mistake: Encoded


@dataclass(frozen=True)
class Mark:
    """Where a policy stands after `step`: `success` is the mean likelihood of the solutions."""

    step: int
    loss: float
    success: float


class Pupil(Protocol):
    """What learns; `SupervisedTrainer` with a model, something quicker in tests."""

    def step(self, episodes: Sequence[Encoded], *, scale: float) -> float:
        """One optimizer step at `scale` times the peak learning rate; returns the loss."""
        ...

    def likelihood(self, episodes: Sequence[Encoded]) -> list[float]:
        """Probability of exactly the answers of each episode."""
        ...


class Curriculum:
    """Trains a pupil, one mark at a time.

    Args:
        lessons: What to learn; every fourth one measures the success.
        target: The success to end at.
    """

    def __init__(self, pupil: Pupil, lessons: Sequence[Lesson], *, batch_size: int, target: float, seed: int) -> None:
        self._pupil, self._lessons, self.target = pupil, lessons, target
        self._rng = random.Random(seed)
        self._batches = _batches(lessons, batch_size, self._rng)
        self._step = 0
        self._known_at: int | None = None

    def teach(self, steps: int, *, slack: float, report: Callable[[Mark], None] = lambda mark: None) -> Mark:
        """Train until the success is within `slack` of the target.

        Raises:
            UserError: `steps` steps in all did not suffice.
        """
        mark = Mark(self._step, float("nan"), 0.0)
        while self._step < steps:
            mark = self._next_mark()
            report(mark)
            if self._known_at is None:
                self._known_at = mark.step if mark.success >= KNOWN else None
            elif mark.step - self._known_at >= UNSURE_STEPS and abs(mark.success - self.target) <= slack:
                return mark
        raise UserError(
            f"the policy solves {mark.success:.2f} after {mark.step} steps, not {self.target:.2f}",
            where="warmup.steps",
            do="give it more steps",
        )

    def _next_mark(self) -> Mark:
        loss = 0.0
        for _ in range(CHECK_EVERY):
            loss = self._one_step()
        likelihood = self._pupil.likelihood([lesson.solution for lesson in self._lessons[::4]])
        return Mark(self._step, loss, sum(likelihood) / len(likelihood))

    def _one_step(self) -> float:
        self._step += 1
        batch = next(self._batches)
        if self._known_at is None:
            return self._pupil.step([x.solution for x in batch], scale=min(1.0, self._step / RAMP))
        first, last = UNSURE_SCALES
        done = min(1.0, (self._step - self._known_at) / UNSURE_STEPS)
        chosen = [x.solution if self._rng.random() < self.target + LIFT else x.mistake for x in batch]
        return self._pupil.step(chosen, scale=first + (last - first) * done)


def _batches(lessons: Sequence[Lesson], size: int, rng: random.Random) -> Iterator[list[Lesson]]:
    queue: list[Lesson] = []
    while True:
        while len(queue) < size:
            queue += rng.sample(list(lessons), len(lessons))
        yield [queue.pop() for _ in range(size)]
