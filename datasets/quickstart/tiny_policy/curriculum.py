"""Supervised curriculum of the tiny policy: first solutions only, then solutions mixed with mistakes.

With too few steps, the policy would fail in ways that reinforcement learning cannot correct from a reward of 0. A
policy that knows the solutions and often makes mistakes solves the wanted share of tasks, and most groups have both
rewards. The share is measured as the likelihood of the solutions, without sampling noise.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from harbortrainer.errors import UserError
from harbortrainer.warmup.encoding import Encoded

KNOWN = 0.98
"""Mean likelihood of the solutions that ends the first phase."""
CHECK_EVERY = 10
RAMP = 20
"""Steps in which the learning rate increases to its maximum."""
MIXED_STEPS = 60
"""Minimum number of steps of the second phase, in which the mistakes become frequent."""
MIXED_SCALES = (0.3, 0.1)
"""Learning rate of the second phase at its start and after `MIXED_STEPS`, as shares of the maximum."""
SHARE_OFFSET = 0.03
"""Added to the share of solutions in the second phase. The likelihood approaches that share slowly, from below."""


@dataclass(frozen=True)
class Example:
    """A sequence that solves a task, and one that does not."""

    solution: Encoded
    mistake: Encoded


@dataclass(frozen=True)
class Progress:
    """State of the policy after `step` steps; `success` is the mean likelihood of the solutions."""

    step: int
    loss: float
    success: float


class Learner(Protocol):
    """A policy in training: `SupervisedTrainer`, or a stub in tests."""

    def step(self, episodes: Sequence[Encoded], *, scale: float) -> float:
        """Take one optimizer step at `scale` times the maximum learning rate; return the loss."""
        ...

    def likelihood(self, episodes: Sequence[Encoded]) -> list[float]:
        """Return the probability of each episode's exact answers."""
        ...


class Curriculum:
    """Trains a learner until its success is at the target.

    Args:
        examples: The training data; every fourth one measures the success.
        target: The success at which training ends.
    """

    def __init__(
        self, learner: Learner, examples: Sequence[Example], *, batch_size: int, target: float, seed: int
    ) -> None:
        self._learner, self._examples, self.target = learner, examples, target
        self._rng = random.Random(seed)
        self._batches = _batches(examples, batch_size, self._rng)
        self._step = 0
        self._mixed_since: int | None = None

    def train(
        self, steps: int, *, tolerance: float, report: Callable[[Progress], None] = lambda progress: None
    ) -> Progress:
        """Train until the success differs from the target by at most `tolerance`.

        Raises:
            UserError: The target was not reached in `steps` steps in total.
        """
        progress = Progress(self._step, float("nan"), 0.0)
        while self._step < steps:
            progress = self._measure()
            report(progress)
            if self._mixed_since is None:
                self._mixed_since = progress.step if progress.success >= KNOWN else None
            elif progress.step - self._mixed_since >= MIXED_STEPS and abs(progress.success - self.target) <= tolerance:
                return progress
        raise UserError(
            f"the policy solves {progress.success:.2f} after {progress.step} steps, not {self.target:.2f}",
            where="warmup.steps",
            do="give it more steps",
        )

    def _measure(self) -> Progress:
        loss = 0.0
        for _ in range(CHECK_EVERY):
            loss = self._train_step()
        likelihood = self._learner.likelihood([example.solution for example in self._examples[::4]])
        return Progress(self._step, loss, sum(likelihood) / len(likelihood))

    def _train_step(self) -> float:
        self._step += 1
        batch = next(self._batches)
        if self._mixed_since is None:
            return self._learner.step([example.solution for example in batch], scale=min(1.0, self._step / RAMP))
        first, last = MIXED_SCALES
        done = min(1.0, (self._step - self._mixed_since) / MIXED_STEPS)
        share = self.target + SHARE_OFFSET
        chosen = [example.solution if self._rng.random() < share else example.mistake for example in batch]
        return self._learner.step(chosen, scale=first + (last - first) * done)


def _batches(examples: Sequence[Example], size: int, rng: random.Random) -> Iterator[list[Example]]:
    queue: list[Example] = []
    while True:
        while len(queue) < size:
            queue += rng.sample(list(examples), len(examples))
        yield [queue.pop() for _ in range(size)]
