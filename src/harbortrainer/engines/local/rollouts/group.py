"""Groups: several rollouts of one task that are compared with each other.

    PLANNED --start--> IN_FLIGHT --last rollout--> FINISHED

Invariants: a finished group trains on its trainable rollouts if there are at least two (with ECHO one), otherwise on
nothing. It has at most `size` of them: each refill replaces one failed rollout. `advantage.py` holds the formula. Every
sampled token of a trial gets its trial's advantage. Samples with an advantage of exactly 0 are pruned before the loss
counts its tokens, as in Prime-RL at commit 559b44772 (`_prune_zero_advantages` in train_sink.py).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

from harbortrainer.config.algorithm_config import Algo
from harbortrainer.engines.local.learner.training_sample import Sample, prune
from harbortrainer.engines.local.rollouts.advantage import MIN_TRAINABLE, TrialLength, group_advantages
from harbortrainer.engines.local.rollouts.rollout import Rollout
from harbortrainer.engines.local.rollouts.schedule import Plan

MAX_REFILL_PART = 4
"""A group plays at most a quarter of its size again, and at least one; so does a batch, also one without a signal."""
MAX_SERVER_ENDS = 5
"""Ends of the environment server after which a rollout is not played again; a run stops before that."""


class DropReason(StrEnum):
    """Why a trial was not trained on."""

    FAILED = "failed"
    """Its outcome does not train, or no token was sampled."""
    TOO_FEW = "too few survivors"
    """The other trials of its group failed."""
    TOO_OLD = "too old"
    """Its policy version is older than `max_off_policy_steps` allows."""
    REJECTED = "rejected by a gate"
    """A gate of the curriculum rejected its group's advantages."""
    NO_SIGNAL = "no signal in its group"
    """All rewards of its group were equal, or with "max_rl" their mean was not above 0."""
    AT_THE_MEAN = "its reward is its group's mean"
    """Other trials of its group trained; its own advantage is exactly 0."""


class GroupState(StrEnum):
    """Stage of a group's life cycle."""

    PLANNED = "planned"
    IN_FLIGHT = "in flight"
    FINISHED = "finished"


@dataclass(slots=True)
class Group:
    """`size` rollouts of one task."""

    id: str
    """Unique in the run."""
    plan: Plan
    """Source and task."""
    size: int
    """Rollouts that the group compares, if none of them fails."""
    algo: Algo = field(default_factory=Algo)
    """How rewards become advantages."""
    version: int = 0
    """Policy version when the group was started."""
    started: bool = False
    """Whether its rollouts were requested from the environment."""
    refills: int = 0
    """Rollouts that were requested in place of failed ones."""
    replays: int = 0
    """Refills because the environment server ended; they do not count for the limit."""
    begun: int = 0
    """Rollouts that got a free slot."""
    rollouts: list[Rollout] = field(default_factory=list)
    """Rollouts that ended, in that order; failed ones stay."""
    too_old: bool = False
    """Dropped because of its age, whatever its rewards."""
    rejected: bool = False
    """Dropped because a gate of the curriculum rejected its advantages."""

    @property
    def missing(self) -> int:
        """Number of rollouts that have not ended."""
        return self.size + self.refills - len(self.rollouts)

    @property
    def running(self) -> int:
        """Number of rollouts that got a free slot and have not ended."""
        return self.begun - len(self.rollouts)

    @property
    def begun_refills(self) -> int:
        """Number of refills that got a free slot; the group's other rollouts get theirs before."""
        return max(0, self.begun - self.size)

    def begin(self) -> None:
        """Count a rollout that got a free slot."""
        self.begun += 1

    @property
    def state(self) -> GroupState:
        """Planned, in flight or finished."""
        if not self.missing:
            return GroupState.FINISHED
        return GroupState.IN_FLIGHT if self.started else GroupState.PLANNED

    def start(self, version: int) -> None:
        """Mark the group as in flight under this policy version.

        Raises:
            ValueError: It is in flight or finished.
        """
        if self.state is not GroupState.PLANNED:
            raise ValueError(f"group {self.id} is {self.state}, not planned")
        self.started, self.version = True, version

    def add(self, rollout: Rollout) -> None:
        """Add a rollout that ended.

        Raises:
            ValueError: The group is not in flight.
        """
        if self.state is not GroupState.IN_FLIGHT:
            raise ValueError(f"group {self.id} is {self.state}, not in flight")
        self.rollouts.append(rollout)

    def refill(self, failed: Rollout) -> bool:
        """Add a place for another rollout in place of a failed one that is not added yet; return whether it did.

        Only outcomes that the outcome table retries count: not the policy's, and another attempt may succeed.
        """
        if failed.server_lost and self.replays < MAX_SERVER_ENDS * self.size:
            self.replays += 1
        elif failed.outcome.retries == 0 or self.refills - self.replays >= max(1, self.size // MAX_REFILL_PART):
            return False
        self.refills += 1
        return True

    @property
    def trainable(self) -> list[Rollout]:
        """Rollouts with a reward and sampled tokens, in order."""
        return [rollout for rollout in self.rollouts if rollout.trainable]

    @property
    def trains(self) -> bool:
        """Whether it is finished and has enough trainable rollouts."""
        least = 1 if any(rollout.has_predicted_tokens for rollout in self.trainable) else MIN_TRAINABLE
        return self.state is GroupState.FINISHED and len(self.trainable) >= least

    @property
    def oldest_version(self) -> int:
        """Oldest policy version that sampled a token of a trainable rollout."""
        versions = [rollout.version for rollout in self.trainable if rollout.version is not None]
        return min(versions, default=self.version)

    def advantages(self) -> list[float]:
        """Return the advantages [n] of the trainable rollouts, in order."""
        return group_advantages(
            [r.reward or 0.0 for r in self.trainable],
            penalty=self.algo.length_penalty,
            lengths=[
                TrialLength(r.total_output_tokens, r.total_tokens - r.total_output_tokens, r.turns, r.output_tokens)
                for r in self.trainable
            ],
            length_weighted=self.algo.length_weighted_baseline,
            normalized=self.algo.type == "max_rl",
        )

    def loss_weight(self, rollout: Rollout) -> float:
        """Return the weight of each sampled token of a trainable rollout in the loss: 1, or 1 over a token count.

        The count is of the trial's sampled tokens (`loss_aggregation` "sequence"), or of all trainable trials of the
        group ("prompt"), before pruning and truncation, as in Prime-RL. Each sampled token counts once.
        """
        match self.algo.loss_aggregation:
            case "sequence":
                return 1 / rollout.output_tokens
            case "prompt":
                return 1 / sum(r.output_tokens for r in self.trainable)
        return 1.0

    def rollout_advantages(self) -> list[tuple[Rollout, float | None, DropReason | None]]:
        """Return every rollout with its advantage, or with the reason why it was not trained on."""
        advantages = dict(zip(map(id, self.trainable), self.advantages(), strict=True))
        signal = any(advantages.values())
        out: list[tuple[Rollout, float | None, DropReason | None]] = []
        for rollout in self.rollouts:
            advantage = advantages.get(id(rollout))
            reason = self._drop_reason(rollout, advantage, signal=signal)
            out.append((rollout, advantage if reason is None else None, reason))
        return out

    def _drop_reason(self, rollout: Rollout, advantage: float | None, *, signal: bool) -> DropReason | None:
        if self.too_old:
            return DropReason.TOO_OLD if rollout.trainable or not rollout.returned else DropReason.FAILED
        if not rollout.trainable:
            return DropReason.FAILED
        if not self.trains:
            return DropReason.TOO_FEW
        if self.rejected:
            return DropReason.REJECTED
        if rollout.has_predicted_tokens:
            return None
        if not signal:
            return DropReason.NO_SIGNAL
        return DropReason.AT_THE_MEAN if advantage == 0.0 else None

    def samples(self) -> list[Sample]:
        """Return the samples of all trainable rollouts with their advantages; pruned samples are left out."""
        return prune(
            replace(sample, advantage=advantage, loss_weight=self.loss_weight(rollout))
            for rollout, advantage in zip(self.trainable, self.advantages(), strict=True)
            for sample in rollout.samples
        )


def rollout_count(groups: Sequence[Group]) -> int:
    """Return the sum of the groups' sizes: unfinished rollouts included, refills not."""
    return sum(group.size for group in groups)
