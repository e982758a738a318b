"""The schedule: which task of which source to run next.

Sources are drawn by their `ratio`. Each epoch goes through a source's tasks once, in a new random order; with
difficulty pools the curriculum draws the tasks.

Invariant: the order depends on the seed only (with pools, on the rewards too). So a resumed run draws the same tasks as
an uninterrupted one. Tasks whose rollouts the stop discarded are drawn again first.
"""

import random
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from harbortrainer.engines.local.rollouts.curriculum import Curriculum
from harbortrainer.runs.checkpoints import ScheduleState

if TYPE_CHECKING:
    from harbortrainer.engines.local.rollouts.group import Group


class Plan(NamedTuple):
    """One task to run: task `index` of source `source`."""

    source: str
    index: int


class Schedule:
    """Draws tasks.

    Args:
        counts: Tasks of each source, by name.
        ratios: Weight of each source, by name.
        seed: The run's seed.
        curricula: Curricula of the sources that have one, by name.

    Example:
        >>> schedule = Schedule({"harbor": 8}, {"harbor": 1.0}, seed=0)
        >>> schedule.next().source
        'harbor'
    """

    def __init__(
        self,
        counts: Mapping[str, int],
        ratios: Mapping[str, float],
        *,
        seed: int,
        curricula: Mapping[str, Curriculum] | None = None,
    ) -> None:
        self.counts, self.ratios, self.seed = dict(counts), dict(ratios), seed
        self.curricula = dict(curricula or {})
        self.pools = {name: it.pools for name, it in self.curricula.items() if it.pools is not None}
        self.drawn = dict.fromkeys(self.counts, 0)
        self.again: list[Plan] = []

    def next(self) -> Plan:
        """Return the next task to run.

        Raises:
            RunStoppedError: The curriculum has no task to draw.
        """
        if self.again:
            return self.again.pop(0)
        source = self._source(sum(self.drawn.values()))
        pools = self.pools.get(source)
        index = pools.draw() if pools is not None else self._index(source, self.drawn[source])
        self.drawn[source] += 1
        return Plan(source, index)

    def _source(self, draw: int) -> str:
        names = list(self.counts)
        weights = [self.ratios[name] for name in names]
        return random.Random(f"{self.seed}/source/{draw}").choices(names, weights=weights)[0]

    def _index(self, source: str, draw: int) -> int:
        epoch, position = divmod(draw, self.counts[source])
        order = list(range(self.counts[source]))
        random.Random(f"{self.seed}/{source}/{epoch}").shuffle(order)
        return order[position]

    def on_result(self, group: "Group") -> bool:
        """Report a finished group to its source's curriculum, and return whether it may train."""
        curriculum = self.curricula.get(group.plan.source)
        return curriculum is None or curriculum.on_result(group)

    def metrics(self) -> dict[str, float]:
        """Return the curricula's metrics since the last call, with Prime-RL's names."""
        return {
            f"curriculum/{source}/{name}": value
            for source, curriculum in self.curricula.items()
            for name, value in curriculum.metrics().items()
        }

    def state(self, outstanding: Sequence[Plan] = ()) -> ScheduleState:
        """Return the state for `restore`.

        Args:
            outstanding: Tasks whose rollouts have not trained yet, and would be lost by a stop.
        """
        scores = {name: dict(pools.scores) for name, pools in self.pools.items()}
        return {"drawn": dict(self.drawn), "again": [*outstanding, *self.again], "task_rewards": scores}

    def restore(self, state: ScheduleState) -> None:
        """Continue from a state; tasks that no longer exist are left out."""
        self.drawn |= {name: count for name, count in state["drawn"].items() if name in self.counts}
        for name, pools in self.pools.items():
            pools.restore(state.get("task_rewards", {}).get(name, {}), self.drawn[name])
        plans = [Plan(*pair) for pair in state["again"]]
        self.again = [plan for plan in plans if plan.index < self.counts.get(plan.source, 0)]
