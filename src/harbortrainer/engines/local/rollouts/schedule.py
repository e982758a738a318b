"""What to sample next: which source, which of its tasks.

Sources are drawn by their `ratio`; a source's tasks are gone through once an epoch, in an order that is shuffled anew
each epoch, or drawn by its curriculum's difficulty pools. Invariant: the order follows from the seed alone (with pools,
from the rewards too), so that a resumed run draws what the first would have drawn; tasks whose rollouts were lost by
the stop are drawn again first.
"""

import random
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from harbortrainer.engines.local.rollouts.curriculum import Curriculum
from harbortrainer.runs.progress import ScheduleState

if TYPE_CHECKING:
    from harbortrainer.engines.local.rollouts.group import Group


class Plan(NamedTuple):
    """One task to be played: task `index` of source `source`."""

    source: str
    index: int


class Schedule:
    """Draws tasks.

    Args:
        counts: Tasks of each source, by name.
        ratios: Weight of each source, by name.
        seed: The run's seed.
        curricula: What the sources' `curriculum` tables ask for, by name; a source that is not in it has none.

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
        """The next task to play.

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
        """A group finished; whether its source's curriculum lets it train."""
        curriculum = self.curricula.get(group.plan.source)
        return curriculum is None or curriculum.on_result(group)

    def metrics(self) -> dict[str, float]:
        """What the curricula did since the last call, by Prime-RL's names."""
        return {
            f"curriculum/{source}/{name}": value
            for source, curriculum in self.curricula.items()
            for name, value in curriculum.metrics().items()
        }

    def state(self, outstanding: Sequence[Plan] = ()) -> ScheduleState:
        """What `restore` needs. `outstanding`: tasks whose rollouts have not trained and would be lost by a stop."""
        scores = {name: dict(pools.scores) for name, pools in self.pools.items()}
        return {"drawn": dict(self.drawn), "again": [*outstanding, *self.again], "task_rewards": scores}

    def restore(self, state: ScheduleState) -> None:
        """Go on where `state` was taken. Tasks that are no longer there are left out."""
        self.drawn |= {name: count for name, count in state["drawn"].items() if name in self.counts}
        for name, pools in self.pools.items():
            pools.restore(state.get("task_rewards", {}).get(name, {}), self.drawn[name])
        plans = [Plan(*pair) for pair in state["again"]]
        self.again = [plan for plan in plans if plan.index < self.counts.get(plan.source, 0)]
