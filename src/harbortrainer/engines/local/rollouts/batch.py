"""Batches: which finished groups a step trains on.

The batch of step n (1, 2, ...) trains policy version n - 1. A group's staleness in it is n - 1 minus the oldest version
that sampled one of its tokens.

Invariants: a batch holds whole groups. A group trains in at most one batch and is never older than the bound. Groups
that were lost (too few trainable rollouts), rejected by a gate or too old are counted and never trained on. A group
counts as arrived once, in the step before which its use was decided.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from harbortrainer.engines.local.learner.training_sample import Sample
from harbortrainer.engines.local.rollouts.group import DropReason, Group, rollout_count
from harbortrainer.engines.local.rollouts.rollout import Rollout
from harbortrainer.errors import RunStoppedError, clauses
from harbortrainer.runs.trial_row import TrialRow
from harbortrainer.trials.outcome import Outcome

MAX_EMPTY_BATCHES = 10
"""Consecutive batches without a signal before a run is stopped, as in Prime-RL."""
MAX_LOST_BATCHES = 3
"""A run is stopped after this many batches' worth of consecutive trials in lost groups. At its start, one batch without
a started sandbox is enough."""
TARGET_LAG = 1
"""Batches that are sampled ahead of the one in training, as in Prime-RL."""


@dataclass(frozen=True, slots=True)
class OffPolicyBound:
    """Maximum age of a rollout when it trains.

    Rule and name are Prime-RL's (`max_off_policy_steps`). The bound is enforced when a batch is cut; besides, no group
    is started that could only become too old.

    Example:
        >>> OffPolicyBound(1).too_old(oldest=3, step=6)
        True
    """

    max_off_policy_steps: int
    """Most policy versions between sampling and training; 0 is strictly on-policy."""

    def staleness(self, oldest: int, step: int) -> int:
        """Return the number of versions between the one that sampled and the one that batch `step` trains."""
        return max(0, step - 1 - oldest)

    def too_old(self, oldest: int, step: int) -> bool:
        """Whether tokens of version `oldest` may not train in batch `step`."""
        return self.staleness(oldest, step) > self.max_off_policy_steps

    def may_start(self, *, version: int, next_step: int, outstanding: int, batch_size: int, room: bool = False) -> bool:
        """Whether one more group may be started now.

        While a step trains, one batch is sampled ahead. While the loop waits for trials, groups fill the free room.

        Args:
            version: The policy version that would sample it.
            next_step: The step whose batch is being collected.
            outstanding: Rollouts in flight, or finished and not yet in a batch.
            batch_size: Rollouts of a batch.
            room: Whether fewer rollouts are in flight than the run allows.
        """
        expected_step = next_step + outstanding // batch_size
        waits = version == next_step - 1
        ahead = max(TARGET_LAG, self.max_off_policy_steps // 2) if room and waits else TARGET_LAG
        return expected_step - 1 - version <= min(self.max_off_policy_steps, ahead)


@dataclass(slots=True)
class StepBatch:
    """The groups and samples of one step."""

    step: int
    groups: list[Group]
    """The groups of the batch, with or without a signal."""
    samples: list[Sample]
    """The learner's samples; empty if every group's rewards were equal."""
    arrived: list[Group] = field(default_factory=list)
    """All groups whose use was decided since the last step: trained, without a signal, lost, rejected or too old."""
    empty_batches: int = 0
    """Batches without a signal since the last step."""

    @property
    def rollouts(self) -> list[Rollout]:
        """All rollouts of `arrived`."""
        return [rollout for group in self.arrived for rollout in group.rollouts]

    def rollout_advantages(self) -> list[tuple[Rollout, float | None, DropReason | None]]:
        """Return every rollout of `arrived` with its advantage, or with the reason why it was not trained on."""
        return [entry for group in self.arrived for entry in group.rollout_advantages()]

    @property
    def trained(self) -> list[Rollout]:
        """The rollouts that the step trains on."""
        return [rollout for rollout, _, reason in self.rollout_advantages() if reason is None]

    def untrained(self) -> Counter[DropReason]:
        """Return the number of rollouts that the step does not train on, by reason."""
        return Counter(reason for _, _, reason in self.rollout_advantages() if reason is not None)

    @property
    def dropped(self) -> int:
        """Number of rollouts that started and were too old. Some of them were cancelled before their end."""
        return sum(len(group.rollouts) for group in self.arrived if group.too_old)

    @property
    def refills(self) -> int:
        """Number of rollouts that got a free slot in place of failed ones."""
        return sum(group.begun_refills for group in self.arrived)

    def rows(self) -> list[TrialRow]:
        """Return the rows of `rollouts/step_N.jsonl`: one for each rollout of `arrived`."""
        return [
            rollout.row(step=self.step, kind="train", group=group.id, advantage=advantage, not_trained=reason)
            for group in self.arrived
            for rollout, advantage, reason in group.rollout_advantages()
        ]


class Batches:
    """Collects finished groups and cuts batches from them.

    Args:
        batch_size: Trials of a batch.
        bound: The maximum age of a trial.
        on_discard: Called with a message on each batch's worth of consecutive trials that no step trains on.
    """

    def __init__(
        self, *, batch_size: int, bound: OffPolicyBound, on_discard: Callable[[str], None] = lambda text: None
    ) -> None:
        self.batch_size, self.bound, self.on_discard = batch_size, bound, on_discard
        self.waiting: list[Group] = []
        """Groups that may train, in the order in which they finished."""
        self.arrived: list[Group] = []
        self.empty_batches = 0
        self.lost: list[Rollout] = []
        """Rollouts of consecutive lost groups."""
        self.rejected: list[Group] = []
        """Consecutive groups that a gate rejected."""
        self.any_trial_started = False
        """Whether a sandbox of this run has started."""

    def add(self, group: Group, *, admitted: bool = True) -> None:
        """Add a finished group.

        Args:
            group: The group.
            admitted: Whether the curriculum's gates admit it.

        Raises:
            RunStoppedError: Too many groups in a row were lost, so something other than the policy fails. Or no sandbox
                started in the first batch. Or too many were rejected: the tasks are too hard or too easy.
        """
        self.any_trial_started |= any(map(sandbox_started, group.rollouts))
        if group.trains:
            self.lost = []
            self._admit(group) if admitted else self._reject(group)
            return
        self.arrived.append(group)
        before = len(self.lost)
        self.lost += group.rollouts
        if not self.any_trial_started:
            refuse_unstarted(self.lost, self.batch_size)
        if len(self.lost) >= MAX_LOST_BATCHES * self.batch_size:
            raise trials_lost_error(self.lost)
        self._report(before, len(self.lost), _most_common(self.lost), MAX_LOST_BATCHES)

    def _report(self, before: int, after: int, reason: str, most: int) -> None:
        """Report a batch's worth of consecutive trials that are not trained on, when it is full."""
        if (batches := after // self.batch_size) > before // self.batch_size:
            in_a_row = f"{batches} of at most {most} batches in a row"
            self.on_discard(clauses(f"discarded {after} trials: {reason}", in_a_row))

    def _admit(self, group: Group) -> None:
        self.waiting.append(group)
        self.rejected = []

    def _reject(self, group: Group) -> None:
        group.rejected = True
        self.arrived.append(group)
        before = rollout_count(self.rejected)
        self.rejected.append(group)
        if (count := rollout_count(self.rejected)) >= MAX_EMPTY_BATCHES * self.batch_size:
            raise groups_rejected_error(self.rejected)
        reason = f"a gate of the curriculum rejected their groups (mean reward {_mean_reward(self.rejected):.2f})"
        self._report(before, count, reason, MAX_EMPTY_BATCHES)

    def drop_old(self, step: int) -> None:
        """Drop waiting groups that are too old to train in batch `step`."""
        waiting, self.waiting = self.waiting, []
        for group in waiting:
            old = self.bound.too_old(group.oldest_version, step)
            self.drop(group) if old else self.waiting.append(group)

    def drop(self, group: Group) -> None:
        """Drop a group that is too old to train, in flight or finished."""
        group.too_old = True
        self.arrived.append(group)

    def ready(self, step: int) -> bool:
        """Drop groups that are too old, and return whether batch `step` can be cut."""
        self.drop_old(step)
        return rollout_count(self.waiting) >= self.batch_size

    def cut(self, step: int) -> StepBatch:
        """Cut batch `step` from the groups that finished first.

        Returns:
            The batch. If it has no samples, it is no step: collect another.

        Raises:
            RunStoppedError: `MAX_EMPTY_BATCHES` batches in a row had no signal.
        """
        groups: list[Group] = []
        while rollout_count(groups) < self.batch_size:
            groups.append(self.waiting.pop(0))
        self.arrived += groups
        samples = [sample for group in groups for sample in group.samples()]
        if not samples:
            self.empty_batches += 1
            if self.empty_batches >= MAX_EMPTY_BATCHES:
                raise no_signal_error(groups)
            reason = f"{_no_signal(groups)} (mean {_mean_reward(groups):.2f})"
            in_a_row = f"{self.empty_batches} of at most {MAX_EMPTY_BATCHES} batches in a row"
            self.on_discard(f"discarded {rollout_count(groups)} trials: {reason}; {in_a_row}")
            return StepBatch(step, groups, [])
        batch = StepBatch(step, groups, samples, self.arrived, self.empty_batches)
        self.arrived, self.empty_batches = [], 0
        return batch


def sandbox_started(rollout: Rollout) -> bool:
    """Whether the rollout's sandbox started, as far as its outcome tells."""
    return rollout.outcome is not Outcome.sandbox_error or rollout.turns > 0 or rollout.server_lost


def refuse_unstarted(lost: list[Rollout], batch_size: int) -> None:
    """Stop the run if a batch's worth of trials has failed, of several tasks: one task alone may be at fault itself.

    Args:
        lost: The trials of a run in which no sandbox has started yet.
        batch_size: Trials of a batch.
    """
    if len(lost) >= batch_size and len({rollout.task_key for rollout in lost}) > 1:
        raise RunStoppedError(
            f"no sandbox started in the first {len(lost)} trials: {_most_common(lost)}",
            do="fix this error and continue with --resume; if you change a task, start a new run",
        )


def trials_lost_error(lost: list[Rollout]) -> RunStoppedError:
    """Return the error of a run whose trials nearly all fail."""
    return RunStoppedError(
        f"the last {len(lost)} trials left no group with two trainable trials, {_most_common(lost)}; "
        "nothing was trained on them",
        do="fix this error and continue with --resume",
    )


def _most_common(lost: list[Rollout]) -> str:
    """Return the most common outcome of the trials that made lost groups too small, with its count and an error."""
    failed = [rollout for rollout in lost if not rollout.trainable] or lost  # with ECHO, a group may have one trial
    outcome, count = Counter(rollout.outcome for rollout in failed).most_common(1)[0]
    no_tokens = "no token was sampled, for example because the first prompt fills the context"
    error = next((r.error for r in reversed(failed) if r.outcome == outcome and r.error), no_tokens)
    return f"{count} of them {outcome} ({error.removeprefix(f'{outcome}: ')})"


def no_signal_error(groups: list[Group]) -> RunStoppedError:
    """Return the error of a run without a signal in any group. A warm-up helps a policy that never succeeds."""
    others = "a larger group_size, or a [warmup] table" if _mean_reward(groups) <= 0 else "or a larger group_size"
    return RunStoppedError(
        f"{MAX_EMPTY_BATCHES} batches in a row had nothing to learn from: {_no_signal(groups)} {_difficulty(groups)}",
        do=f"choose tasks that the policy solves sometimes, {others}",
    )


def _no_signal(groups: list[Group]) -> str:
    """Return why no group has an advantage other than 0."""
    if all(len({rollout.reward for rollout in group.trainable}) == 1 for group in groups):
        return "within every group all rewards were equal"
    return "every group's rewards were equal or, with max_rl, had a mean that is not above 0"


def groups_rejected_error(groups: list[Group]) -> RunStoppedError:
    """Return the error of a run whose gates reject every group."""
    return RunStoppedError(
        f"{MAX_EMPTY_BATCHES} batches' worth of trials in a row were rejected by a gate of the curriculum "
        f"{_difficulty(groups)}",
        do="choose tasks that the policy solves sometimes, a larger group_size, or a narrower range of the gate",
    )


def _difficulty(groups: list[Group]) -> str:
    mean = _mean_reward(groups)
    return f"(mean {mean:.2f}), so the tasks are {'too hard' if mean < 0.5 else 'too easy'} for this policy"


def _mean_reward(groups: list[Group]) -> float:
    rewards = [rollout.reward or 0.0 for group in groups for rollout in group.trainable]
    return sum(rewards) / len(rewards)
