"""From finished groups to batches.

A batch of step n (1, 2, ...) trains on policy version n - 1. A group's staleness there is n - 1 minus the oldest
version that sampled one of its tokens. Invariant: a batch holds whole groups, each trains in one batch at most, and
none is older than the bound when it is cut. Groups that were lost (fewer than two survivors), rejected by a gate or
grew too old are counted, never trained. A group arrives once: with the step before which it was decided what becomes
of it.
"""

from collections import Counter
from dataclasses import dataclass, field

from harbortrainer.engines.local.learner.training_sample import Sample
from harbortrainer.engines.local.rollouts.group import Group, Untrained, sizes
from harbortrainer.engines.local.rollouts.rollout import Rollout
from harbortrainer.errors import RunStoppedError

MAX_EMPTY_BATCHES = 10
"""Consecutive batches without a signal before a run is stopped, as in Prime-RL."""
MAX_LOST_BATCHES = 3
"""Consecutive batches' worth of trials without two survivors in a group before a run is stopped."""


TARGET_LAG = 1
"""Batches that are sampled ahead of the one in training, as in Prime-RL."""


@dataclass(frozen=True, slots=True)
class OffPolicyBound:
    """How old a rollout may be when it trains: Prime-RL's rule and name (`max_off_policy_steps`), enforced where the
    batch is cut; on top of it nothing is started that could only become too old.

    Example:
        >>> OffPolicyBound(1).too_old(oldest=3, step=6)
        True
    """

    max_off_policy_steps: int
    """Most policy versions between sampling and training; 0 is strictly on-policy."""

    def staleness(self, oldest: int, step: int) -> int:
        """Versions between the one that sampled and the one that batch `step` trains on."""
        return max(0, step - 1 - oldest)

    def too_old(self, oldest: int, step: int) -> bool:
        """Whether tokens of version `oldest` may no longer train in batch `step`."""
        return self.staleness(oldest, step) > self.max_off_policy_steps

    def may_start(self, *, version: int, next_step: int, outstanding: int, batch_size: int) -> bool:
        """Whether one more group may be started now.

        Args:
            version: The policy version that would sample it.
            next_step: The step whose batch is being collected.
            outstanding: Rollouts planned, in flight, or finished and not yet cut into a batch.
            batch_size: Rollouts of a batch.
        """
        lands_in = next_step + outstanding // batch_size
        return lands_in - 1 - version <= min(self.max_off_policy_steps, TARGET_LAG)


@dataclass(slots=True)
class StepBatch:
    """What one step trains on."""

    step: int
    groups: list[Group]
    """Those that were cut, with or without a signal."""
    samples: list[Sample]
    """What the learner sees; empty when every group's rewards were equal."""
    arrived: list[Group] = field(default_factory=list)
    """Every group of which it was decided since the last step what becomes of it: these, those without a signal, lost
    or too old."""
    empty_batches: int = 0
    """Batches without a signal that came before this one."""

    @property
    def rollouts(self) -> list[Rollout]:
        """Every rollout of `arrived`."""
        return [rollout for group in self.arrived for rollout in group.rollouts]

    def credits(self) -> list[tuple[Rollout, float | None, Untrained | None]]:
        """Every rollout of `arrived` with its advantage, or why it did not train."""
        return [credit for group in self.arrived for credit in group.credits()]

    @property
    def trained(self) -> list[Rollout]:
        """The rollouts that the learner sees."""
        return [rollout for rollout, _, reason in self.credits() if reason is None]

    @property
    def dropped(self) -> int:
        """Rollouts that were too old, those that were cancelled for it included."""
        return sizes([group for group in self.arrived if group.too_old])

    def rows(self) -> list[dict[str, object]]:
        """The lines of `rollouts/step_N.jsonl`: what arrived, with its advantage or why it did not train."""
        return [
            rollout.row(step=self.step, kind="train", group=group.id, advantage=advantage, not_trained=reason)
            for group in self.arrived
            for rollout, advantage, reason in group.credits()
        ]


class Batches:
    """Collects finished groups and cuts batches."""

    def __init__(self, *, batch_size: int, bound: OffPolicyBound) -> None:
        self.batch_size, self.bound = batch_size, bound
        self.waiting: list[Group] = []
        self.arrived: list[Group] = []
        self.empty_batches = 0
        self.lost: list[Rollout] = []
        self.rejected: list[Group] = []

    def add(self, group: Group, *, admitted: bool = True) -> None:
        """A group finished; `admitted`: no gate rejected it.

        Raises:
            RunStoppedError: Too many in a row were lost: something other than the policy is broken. Or rejected: the
                tasks are too hard, or too easy.
        """
        if group.trains:
            self.lost = []
            self._admit(group) if admitted else self._reject(group)
            return
        self.arrived.append(group)
        self.lost += group.rollouts
        if len(self.lost) >= MAX_LOST_BATCHES * self.batch_size:
            raise too_many_lost(self.lost)

    def _admit(self, group: Group) -> None:
        self.waiting.append(group)
        self.rejected = []

    def _reject(self, group: Group) -> None:
        group.rejected = True
        self.arrived.append(group)
        self.rejected.append(group)
        if sizes(self.rejected) >= MAX_EMPTY_BATCHES * self.batch_size:
            raise all_rejected(self.rejected)

    def sweep(self, step: int) -> None:
        """Drop waiting groups that are too old to train in batch `step`."""
        waiting, self.waiting = self.waiting, []
        for group in waiting:
            old = self.bound.too_old(group.oldest_version, step)
            self.drop(group) if old else self.waiting.append(group)

    def drop(self, group: Group) -> None:
        """A group that is too old to train, in flight or finished."""
        group.too_old = True
        self.arrived.append(group)

    def ready(self, step: int) -> bool:
        """Whether batch `step` can be cut."""
        self.sweep(step)
        return sizes(self.waiting) >= self.batch_size

    def cut(self, step: int) -> StepBatch:
        """Cut batch `step`: the groups that finished first, until they fill it.

        Returns:
            The batch. One without samples does not make a step: collect another.

        Raises:
            RunStoppedError: Ten batches in a row had no signal.
        """
        groups: list[Group] = []
        while sizes(groups) < self.batch_size:
            groups.append(self.waiting.pop(0))
        self.arrived += groups
        samples = [sample for group in groups for sample in group.samples()]
        if not samples:
            self.empty_batches += 1
            if self.empty_batches >= MAX_EMPTY_BATCHES:
                raise no_signal(groups)
            return StepBatch(step, groups, [])
        batch = StepBatch(step, groups, samples, self.arrived, self.empty_batches)
        self.arrived, self.empty_batches = [], 0
        return batch


def too_many_lost(lost: list[Rollout]) -> RunStoppedError:
    """The message for a run whose trials all fail."""
    outcome, count = Counter(rollout.outcome for rollout in lost).most_common(1)[0]
    unsampled = "not one token was sampled, as when the first prompt already fills the context"
    error = next((r.error for r in reversed(lost) if r.outcome == outcome and r.error), unsampled)
    return RunStoppedError(
        f"the last {len(lost)} trials left no group with two survivors, {count} of them {outcome} ({error}); "
        "nothing was trained on them",
        do="mend what is named here and go on with --resume",
    )


def no_signal(groups: list[Group]) -> RunStoppedError:
    """The message for a run whose rewards are all equal within their groups."""
    return RunStoppedError(
        f"{MAX_EMPTY_BATCHES} batches in a row had nothing to learn from: within every group all rewards were equal "
        f"{_verdict(groups)}",
        do="choose tasks that the policy solves sometimes, or a larger group_size",
    )


def all_rejected(groups: list[Group]) -> RunStoppedError:
    """The message for a run whose gates let nothing train."""
    return RunStoppedError(
        f"{MAX_EMPTY_BATCHES} batches' worth of trials in a row were rejected by a gate of the curriculum "
        f"{_verdict(groups)}",
        do="choose tasks that the policy solves sometimes, a larger group_size, or a narrower range of the gate",
    )


def _verdict(groups: list[Group]) -> str:
    rewards = [rollout.reward or 0.0 for group in groups for rollout in group.survivors]
    mean = sum(rewards) / len(rewards)
    return f"(mean {mean:.2f}), so the tasks are {'too hard' if mean < 0.5 else 'too easy'} for this policy"
