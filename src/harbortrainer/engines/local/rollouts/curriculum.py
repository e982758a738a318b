"""The curriculum of one source: which tasks are drawn, and which finished groups train.

Every finished group is observed, whatever its rewards. A group that a gate rejects does not train, and another one is
run in its place. Groups that were cancelled because of their age are not observed.

Invariant: the draws of the pools depend on their seed and scores only. Each draw takes one number from the generator,
so the number of draws is its whole state.

Source: Prime-RL at commit 559b44772, `Curriculum`, `AdvRangeGate`,
`DifficultyPoolSampler` and `TrainSource` (src/prime_rl/orchestrator/curriculum/, train_source.py). Two
differences: scores measured before the run are used until a task's first group, where Prime-RL's tasks begin unseen.
The standard sampler shuffles the tasks in each epoch, where Prime-RL keeps their order.
"""

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from harbortrainer.config.algorithm_config import CurriculumConfig, PoolSampling
from harbortrainer.errors import RunStoppedError, UserError

if TYPE_CHECKING:
    from harbortrainer.engines.local.rollouts.group import Group

UNSEEN = 1.0
"""Weight of a task that has not been run yet."""


class DifficultyPools:
    """Draws the tasks of one source by difficulty.

    A task's score is the mean reward of its latest group. Its pool is the first one, by threshold, whose threshold is
    at least the score, or the last pool.

    Args:
        config: The `sampler` table.
        keys: The content hash of every task, in the order of the source.
        measured: Mean rewards measured before the run, by content hash.

    Raises:
        UserError: Two tasks have the same content.
    """

    def __init__(self, config: PoolSampling, keys: Sequence[str], measured: Mapping[str, float]) -> None:
        self.keys = list(keys)
        duplicates = [key for key, count in Counter(keys).items() if count > 1]
        if duplicates:
            raise UserError(
                f"{len(duplicates)} tasks are in this source more than once, so their difficulty is ambiguous",
                where="orchestrator.train.source.curriculum",
                do="remove the copies (`harbortrainer tasks check` lists them)",
            )
        self.weights = {name: pool.weight for name, pool in config.pools.items()}
        self.thresholds = sorted((pool.threshold, name) for name, pool in config.pools.items())
        self.rng = random.Random(config.seed)
        self.scores = {key: measured[key] for key in keys if key in measured}

    def pool(self, key: str) -> str | None:
        """Return the pool of a task; None if it has not been run yet."""
        score = self.scores.get(key)
        if score is None:
            return None
        return next((name for threshold, name in self.thresholds if score <= threshold), self.thresholds[-1][1])

    def draw(self) -> int:
        """Return the index of the task to run next.

        Raises:
            RunStoppedError: Every task is in a pool of weight 0.
        """
        weights = [UNSEEN if (name := self.pool(key)) is None else self.weights[name] for key in self.keys]
        if not any(weights):
            raise RunStoppedError(
                f"all {len(weights)} tasks are in difficulty pools of weight 0, so no task can be drawn",
                do="give every pool a weight above 0, or choose other tasks",
            )
        return self.rng.choices(range(len(weights)), weights=weights)[0]

    def observe(self, key: str, rewards: Sequence[float]) -> None:
        """Set a task's score from the rewards of a finished group's graded trials; no change without a reward."""
        if rewards:
            self.scores[key] = sum(rewards) / len(rewards)

    def restore(self, scores: Mapping[str, float], drawn: int) -> None:
        """Continue after `drawn` draws; scores of tasks that no longer exist are left out."""
        self.scores = {key: score for key, score in scores.items() if key in self.keys}
        for _ in range(drawn):
            self.rng.random()

    def metrics(self) -> dict[str, float]:
        """Return the number of tasks in each pool, with Prime-RL's names."""
        pools = Counter(self.pool(key) for key in self.scores)
        unseen = {"pool/unseen": float(len(self.keys) - len(self.scores))}
        return unseen | {f"pool/{name}": float(pools[name]) for name in self.weights}


class Curriculum:
    """The difficulty pools and gates of one source.

    Args:
        config: The source's `curriculum` table, or None for the defaults.
        keys: The content hash of every task, in the order of the source.
        measured: Mean rewards measured before the run, by content hash: the initial scores.

    Raises:
        UserError: There are pools, and two tasks have the same content.
    """

    def __init__(
        self, config: CurriculumConfig | None, keys: Sequence[str], measured: Mapping[str, float] | None = None
    ) -> None:
        config = config or CurriculumConfig()
        sampler = config.sampler
        self.keys = keys
        self.pools = DifficultyPools(sampler, keys, measured or {}) if isinstance(sampler, PoolSampling) else None
        self.gates = list(config.gates.values())
        self.admitted, self.rejected = 0, 0

    def on_result(self, group: "Group") -> bool:
        """Observe a finished group, and return whether it may train."""
        if self.pools is not None:
            rewards = [rollout.reward for rollout in group.rollouts if rollout.reward is not None]
            self.pools.observe(self.keys[group.plan.index], rewards)
        advantages = group.advantages()
        inside = (all(gate.reject_min <= a <= gate.reject_max for a in advantages) for gate in self.gates)
        admitted = not (advantages and any(inside))
        self.admitted, self.rejected = self.admitted + admitted, self.rejected + (not admitted)
        return admitted

    def metrics(self) -> dict[str, float]:
        """Return the admission rate since the last call, and the pools' sizes, with Prime-RL's names."""
        total, share = self.admitted + self.rejected, self.admitted / max(1, self.admitted + self.rejected)
        self.admitted, self.rejected = 0, 0
        pools = self.pools.metrics() if self.pools is not None else {}
        rate = {"admission_rate": share} if total else {}
        return rate | {f"sampler/{name}": value for name, value in pools.items()}
