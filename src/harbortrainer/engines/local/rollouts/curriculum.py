"""The curriculum of one source: what is drawn, and which finished groups train.

Every group that finishes is observed, whatever its rewards; one that a gate rejects does not train and another is
played in its place. Groups that were cancelled for their age are no result, and are not observed. Invariant: what
pools draw follows from their seed and scores alone, and each draw takes one number of the generator, so that the
count of draws is its whole state. Source: Prime-RL at commit 559b44772, `Curriculum`, `AdvRangeGate`,
`DifficultyPoolSampler` and `TrainSource` (src/prime_rl/orchestrator/curriculum/, train_source.py). Two things are ours:
scores that were measured before the run stand in until a task's first group, where Prime-RL's tasks begin unseen; and
the standard sampler shuffles the tasks anew each epoch, where Prime-RL keeps their order.
"""

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from harbortrainer.config.curriculum_table import CurriculumConfig, PoolSampling
from harbortrainer.errors import RunStoppedError, UserError

if TYPE_CHECKING:
    from harbortrainer.engines.local.rollouts.group import Group

UNSEEN = 1.0
"""The weight of a task that was not played yet."""


class DifficultyPools:
    """Draws the tasks of one source by how the policy did on them when it last played them: a task's score is the mean
    reward of its latest group; it lies in the first pool, by threshold, whose threshold that does not exceed, or in the
    last.

    Args:
        config: The `sampler` table.
        keys: The content hash of every task, in the order of the source.
        measured: Mean rewards from before the run, by content hash.

    Raises:
        UserError: Two tasks are the same.
    """

    def __init__(self, config: PoolSampling, keys: Sequence[str], measured: Mapping[str, float]) -> None:
        self.keys = list(keys)
        twins = [key for key, count in Counter(keys).items() if count > 1]
        if twins:
            raise UserError(
                f"{len(twins)} tasks are in this source twice, so that their difficulty is not one task's",
                where="orchestrator.train.source.curriculum",
                do="remove the copies (`harbortrainer tasks check` names tasks)",
            )
        self.weights = {name: pool.weight for name, pool in config.pools.items()}
        self.thresholds = sorted((pool.threshold, name) for name, pool in config.pools.items())
        self.rng = random.Random(config.seed)
        self.scores = {key: measured[key] for key in keys if key in measured}

    def pool(self, key: str) -> str | None:
        """The pool that a task is in; None for one that was not played yet."""
        score = self.scores.get(key)
        if score is None:
            return None
        return next((name for threshold, name in self.thresholds if score <= threshold), self.thresholds[-1][1])

    def draw(self) -> int:
        """The task to play next, as its place in the source.

        Raises:
            RunStoppedError: Every task is in a pool of weight 0.
        """
        weights = [UNSEEN if (name := self.pool(key)) is None else self.weights[name] for key in self.keys]
        if not any(weights):
            raise RunStoppedError(
                f"all {len(weights)} tasks are in difficulty pools of weight 0, so there is none to draw",
                do="give every pool a weight above 0, or choose other tasks",
            )
        return self.rng.choices(range(len(weights)), weights=weights)[0]

    def observe(self, key: str, rewards: Sequence[float]) -> None:
        """A group of a task finished, with these rewards of its graded trials; none of them says nothing."""
        if rewards:
            self.scores[key] = sum(rewards) / len(rewards)

    def restore(self, scores: Mapping[str, float], drawn: int) -> None:
        """Go on after so many draws; scores of tasks that are no longer there are left out."""
        self.scores = {key: score for key, score in scores.items() if key in self.keys}
        for _ in range(drawn):
            self.rng.random()

    def metrics(self) -> dict[str, float]:
        """How many tasks are in each pool, by Prime-RL's names."""
        pools = Counter(self.pool(key) for key in self.scores)
        unseen = {"pool/unseen": float(len(self.keys) - len(self.scores))}
        return unseen | {f"pool/{name}": float(pools[name]) for name in self.weights}


class Curriculum:
    """What a source's `curriculum` table asks for.

    Args:
        config: The table, or None for what it defaults to.
        keys: The content hash of every task, in the order of the source.
        measured: Mean rewards from before the run, by content hash: where pools begin.

    Raises:
        UserError: There are pools, and two tasks are the same.
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
        """A group finished; whether it may train."""
        if self.pools is not None:
            rewards = [rollout.reward for rollout in group.rollouts if rollout.reward is not None]
            self.pools.observe(self.keys[group.plan.index], rewards)
        advantages = group.advantages()
        inside = (all(gate.reject_min <= a <= gate.reject_max for a in advantages) for gate in self.gates)
        admitted = not (advantages and any(inside))
        self.admitted, self.rejected = self.admitted + admitted, self.rejected + (not admitted)
        return admitted

    def metrics(self) -> dict[str, float]:
        """The share of groups admitted since the last call, and what the pools hold, by Prime-RL's names."""
        total, share = self.admitted + self.rejected, self.admitted / max(1, self.admitted + self.rejected)
        self.admitted, self.rejected = 0, 0
        pools = self.pools.metrics() if self.pools is not None else {}
        rate = {"admission_rate": share} if total else {}
        return rate | {f"sampler/{name}": value for name, value in pools.items()}
