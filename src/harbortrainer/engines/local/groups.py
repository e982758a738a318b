"""A group: rollouts of one task whose mean reward is each other's baseline.

    PLANNED --start--> IN_FLIGHT --last rollout--> FINISHED

Invariant: a finished group trains on its survivors when at least two are left, and on nothing otherwise. A rollout
that failed takes no part in the mean: it does not count as a reward of 0, and it does not lower the others'.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

from harbortrainer.engines.local.learner.advantage import MIN_SURVIVORS, TrialLength, group_advantages
from harbortrainer.engines.local.learner.sample import Sample
from harbortrainer.engines.local.learner.settings import LengthPenalty
from harbortrainer.engines.local.rollout import Rollout
from harbortrainer.engines.local.schedule import Plan


class GroupState(StrEnum):
    """Where in its life a group is."""

    PLANNED = "planned"
    IN_FLIGHT = "in flight"
    FINISHED = "finished"


@dataclass(slots=True)
class Group:
    """One task, played `size` times."""

    id: str
    """Unique in the run."""
    plan: Plan
    """Which task of which source."""
    size: int
    """Rollouts it owes."""
    penalty: LengthPenalty | None = None
    """What a reward loses for length before the mean is taken (`algo.length_penalty`)."""
    version: int = 0
    """The policy version when it was started."""
    started: bool = False
    """Whether its rollouts were handed to the environment."""
    rollouts: list[Rollout] = field(default_factory=list)
    """Those that ended, in the order in which they did."""

    @property
    def state(self) -> GroupState:
        """Planned, in flight or finished."""
        if len(self.rollouts) >= self.size:
            return GroupState.FINISHED
        return GroupState.IN_FLIGHT if self.started else GroupState.PLANNED

    def start(self, version: int) -> None:
        """The group's rollouts begin, under this policy version."""
        if self.state is not GroupState.PLANNED:
            raise ValueError(f"group {self.id} is {self.state}, not planned")
        self.started, self.version = True, version

    def add(self, rollout: Rollout) -> None:
        """One rollout ended."""
        if self.state is not GroupState.IN_FLIGHT:
            raise ValueError(f"group {self.id} is {self.state}, not in flight")
        self.rollouts.append(rollout)

    @property
    def survivors(self) -> list[Rollout]:
        """The rollouts with a reward and tokens."""
        return [rollout for rollout in self.rollouts if rollout.survived]

    @property
    def trains(self) -> bool:
        """Whether enough survived for a baseline."""
        return self.state is GroupState.FINISHED and len(self.survivors) >= MIN_SURVIVORS

    @property
    def oldest_version(self) -> int:
        """The oldest policy version that any survivor's token was sampled by."""
        versions = [rollout.version for rollout in self.survivors if rollout.version is not None]
        return min(versions, default=self.version)

    def advantages(self) -> list[float]:
        """[S] reward minus the survivors' mean, one per survivor, in order."""
        survivors = self.survivors
        lengths = [TrialLength(r.output_tokens, r.total_tokens - r.output_tokens, r.turns) for r in survivors]
        return group_advantages([r.reward or 0.0 for r in survivors], penalty=self.penalty, lengths=lengths)

    def samples(self) -> list[Sample]:
        """Every sample of every survivor with its advantage; those of advantage 0 carry no signal and are left out."""
        return [
            replace(sample, advantage=advantage, group_id=self.id)
            for rollout, advantage in zip(self.survivors, self.advantages(), strict=True)
            if advantage != 0.0
            for sample in rollout.samples
        ]


def sizes(groups: Sequence[Group]) -> int:
    """Rollouts that these groups owe together."""
    return sum(group.size for group in groups)
