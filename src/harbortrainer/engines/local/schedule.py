"""What to sample next: which source, which of its tasks.

Sources are drawn by their `ratio`; a source's tasks are gone through once an epoch, in an order that is shuffled anew
each epoch. Invariant: the order follows from the seed alone, so that a resumed run draws what the first would have
drawn; tasks whose rollouts were lost by the stop are drawn again first.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Plan:
    """One task to be played: task `index` of source `source`."""

    source: str
    index: int


class Schedule:
    """Draws tasks.

    Args:
        counts: Tasks of each source, by name.
        ratios: Weight of each source, by name.
        seed: The run's seed.

    Example:
        >>> schedule = Schedule({"harbor": 8}, {"harbor": 1.0}, seed=0)
        >>> schedule.next().source
        'harbor'
    """

    def __init__(self, counts: Mapping[str, int], ratios: Mapping[str, float], *, seed: int) -> None:
        self.counts, self.ratios, self.seed = dict(counts), dict(ratios), seed
        self.drawn = dict.fromkeys(self.counts, 0)
        self.again: list[Plan] = []

    def next(self) -> Plan:
        """The next task to play."""
        if self.again:
            return self.again.pop(0)
        source = self._source(sum(self.drawn.values()))
        index = self._index(source, self.drawn[source])
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

    def state(self, outstanding: Sequence[Plan] = ()) -> dict[str, Any]:
        """What `restore` needs. `outstanding`: tasks whose rollouts have not trained and would be lost by a stop."""
        return {"drawn": dict(self.drawn), "again": [[p.source, p.index] for p in [*outstanding, *self.again]]}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on where `state` was taken. Tasks that are no longer there are left out."""
        self.drawn |= {name: int(count) for name, count in state["drawn"].items() if name in self.counts}
        plans = [Plan(str(source), int(index)) for source, index in state["again"]]
        self.again = [plan for plan in plans if plan.index < self.counts.get(plan.source, 0)]
