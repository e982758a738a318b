"""The held-out reward of a run, first against last evaluation, and what that difference is worth (`estimates/`)."""

from collections.abc import Sequence
from dataclasses import dataclass

from harbortrainer.estimates.interval import Estimate, mean_reward
from harbortrainer.estimates.paired import PairedDifference, paired_difference
from harbortrainer.view.charts import Mark
from harbortrainer.view.shown_trial import OPEN
from harbortrainer.view.spoken import reward
from harbortrainer.view.trial_store import TrialStore


@dataclass(frozen=True, slots=True)
class HeldOut:
    """The evaluations of a run."""

    steps: Sequence[int]
    """The policy versions that were evaluated."""
    estimates: Sequence[Estimate]
    """Of each."""
    gain: PairedDifference | None
    """Last minus first, on the tasks that both have; None under two evaluations."""

    @property
    def marks(self) -> list[Mark]:
        """For the chart."""
        both = zip(self.steps, self.estimates, strict=True)
        return [
            Mark(
                step,
                found.mean,
                found.low,
                found.high,
                f"held-out, policy version {step}: {found}, {found.tasks} tasks",
            )
            for step, found in both
            if found.mean is not None
        ]

    @property
    def verdict(self) -> str:
        """What the gain's interval says, in words."""
        if self.gain is None:
            return ""
        tasks = f"{self.gain.tasks} task" + ("" if self.gain.tasks == 1 else "s")
        if self.gain.low is None:
            return f"On {tasks} nobody can tell."
        if self.gain.shown:
            return f"Shown on {tasks}: the 95 % interval leaves 0 out."
        smallest = (
            "" if self.gain.smallest is None else f" They would show {reward(self.gain.smallest)} four times in five."
        )
        return f"Not shown: on {tasks} the 95 % interval holds 0.{smallest}"


def held_out(store: TrialStore) -> HeldOut:
    """The evaluations of a run, by the trials that it wrote down."""
    steps = [step for kind, step in store.outcomes() if kind == "eval" and step != OPEN]
    rewards = [store.rewards("eval", step) for step in steps]
    gain = paired_difference(rewards[0], rewards[-1]) if len(steps) > 1 else None
    return HeldOut(steps, [mean_reward(own) for own in rewards], gain)
