"""How old a rollout may be when it trains.

A batch of step n (1, 2, ...) trains on policy version n - 1. A group's staleness there is n - 1 minus the oldest
version that sampled one of its tokens. Prime-RL's rule and name (`max_off_policy_steps`), enforced where the batch is
cut; on top of it nothing is started that could only become too old.
"""

from dataclasses import dataclass

TARGET_LAG = 1
"""Batches that are sampled ahead of the one in training, as in Prime-RL."""


@dataclass(frozen=True, slots=True)
class OffPolicyBound:
    """The bound, and what follows from it.

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
        lag = min(self.max_off_policy_steps, TARGET_LAG)
        return lands_in - 1 - version <= lag
