"""From finished groups to batches.

Invariant: a batch holds whole groups, each trains in one batch at most, and none is older than the bound when it is
cut. Groups that were lost (fewer than two survivors) or grew too old are counted, never trained.
"""

from collections import Counter
from dataclasses import dataclass, field

from harbortrainer.engines.local.groups import Group, sizes
from harbortrainer.engines.local.learner.sample import Sample
from harbortrainer.engines.local.rollout import Rollout
from harbortrainer.engines.local.staleness import OffPolicyBound
from harbortrainer.engines.local.stop import RunStoppedError

MAX_EMPTY_BATCHES = 10
"""Consecutive batches without a signal before a run is stopped, as in Prime-RL."""
MAX_LOST_BATCHES = 3
"""Consecutive batches' worth of trials without two survivors in a group before a run is stopped."""


@dataclass(slots=True)
class Batch:
    """What one step trains on."""

    step: int
    groups: list[Group]
    """Those that were cut, with or without a signal."""
    samples: list[Sample]
    """What the learner sees; empty when every group's rewards were equal."""
    arrived: list[Rollout] = field(default_factory=list)
    """Every rollout that ended since the last step, also of groups that were lost or too old."""
    dropped: int = 0
    """Rollouts among them that were too old."""
    empty_batches: int = 0
    """Batches without a signal that came before this one."""


class Batches:
    """Collects finished groups and cuts batches."""

    def __init__(self, *, batch_size: int, bound: OffPolicyBound) -> None:
        self.batch_size, self.bound = batch_size, bound
        self.waiting: list[Group] = []
        self.arrived: list[Rollout] = []
        self.dropped = 0
        self.empty_batches = 0
        self.lost: list[Rollout] = []

    def add(self, group: Group) -> None:
        """A group finished.

        Raises:
            RunStoppedError: Too many in a row were lost: something other than the policy is broken.
        """
        self.arrived += group.rollouts
        if group.trains:
            self.waiting.append(group)
            self.lost = []
            return
        self.lost += group.rollouts
        if len(self.lost) >= MAX_LOST_BATCHES * self.batch_size:
            raise too_many_lost(self.lost)

    def sweep(self, step: int) -> None:
        """Drop waiting groups that are too old to train in batch `step`."""
        old = [group for group in self.waiting if self.bound.too_old(group.oldest_version, step)]
        self.dropped += sizes(old)
        self.waiting = [group for group in self.waiting if group not in old]

    def ready(self, step: int) -> bool:
        """Whether batch `step` can be cut."""
        self.sweep(step)
        return sizes(self.waiting) >= self.batch_size

    def cut(self, step: int) -> Batch:
        """Cut batch `step`: the groups that finished first, until they fill it.

        Returns:
            The batch. One without samples does not make a step: collect another.

        Raises:
            RunStoppedError: Ten batches in a row had no signal.
        """
        groups: list[Group] = []
        while sizes(groups) < self.batch_size:
            groups.append(self.waiting.pop(0))
        samples = [sample for group in groups for sample in group.samples()]
        if not samples:
            self.empty_batches += 1
            if self.empty_batches >= MAX_EMPTY_BATCHES:
                raise no_signal(groups)
            return Batch(step, groups, [])
        batch = Batch(step, groups, samples, self.arrived, self.dropped, self.empty_batches)
        self.arrived, self.dropped, self.empty_batches = [], 0, 0
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
    rewards = [rollout.reward or 0.0 for group in groups for rollout in group.survivors]
    mean = sum(rewards) / len(rewards)
    side = "too hard" if mean < 0.5 else "too easy"
    return RunStoppedError(
        f"{MAX_EMPTY_BATCHES} batches in a row had nothing to learn from: within every group all rewards were equal "
        f"(mean {mean:.2f}), so the tasks are {side} for this policy",
        do="choose tasks that the policy solves sometimes, or a larger group_size",
    )
