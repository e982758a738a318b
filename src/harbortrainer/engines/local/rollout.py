"""A finished rollout as the loop sees it: what came of one episode, and the samples it yields.

Invariant: a rollout whose outcome does not train has no reward and no samples. A failure is never a reward of 0.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from harbortrainer.engines.local.learner.sample import Sample


@dataclass(kw_only=True, slots=True)
class Rollout:
    """One trial that ended.

    Example:
        >>> Rollout(source="harbor", task="fix", outcome="completed", reward=1.0, samples=[sample]).survived
        True
    """

    source: str
    """Name of the source it came from."""
    task: str = ""
    """The task's name."""
    task_key: str = ""
    """The task's content hash."""
    trial: str = ""
    """The trial's name, or the trace's id when no trial was started."""
    outcome: str
    """How it ended (`harbortrainer.trials.outcome.Outcome`)."""
    reward: float | None = None
    """The scalar that trains; None when the outcome does not."""
    samples: list[Sample] = field(default_factory=list)
    """[B] one a branch, advantages not yet set."""
    version: int | None = None
    """The oldest policy version that sampled one of its tokens; None when none was sampled."""
    newest_version: int | None = None
    """The newest one."""
    turns: int = 0
    """Model calls that are on the trace."""
    branches: int = 0
    """Leaves of the trace."""
    input_tokens: int = 0
    """Tokens that were fed in, counted once."""
    output_tokens: int = 0
    """Tokens that were sampled."""
    total_tokens: int = 0
    """Length of the final sequences, summed over branches."""
    truncated: bool = False
    """Whether a limit cut it."""
    metrics: dict[str, float] = field(default_factory=dict)
    """What the environment measured, by name."""
    timings: dict[str, float] = field(default_factory=dict)
    """Seconds of each phase of the trial."""
    record: dict[str, Any] = field(default_factory=dict)
    """Harbor's side of it (`trace.info["harbor"]`)."""
    error: str | None = None
    """What went wrong, in one line."""

    @property
    def survived(self) -> bool:
        """Whether it can be a member of its group's baseline: it has a reward and tokens that were sampled."""
        return self.reward is not None and bool(self.samples)

    def row(self, **extra: Any) -> dict[str, Any]:
        """The line of `rollouts/step_N.jsonl`."""
        return {
            **extra,
            "source": self.source,
            "task": self.task,
            "task_key": self.task_key,
            "trial": self.trial,
            "outcome": self.outcome,
            "reward": self.reward,
            "rewards": self.record.get("rewards"),
            "turns": self.turns,
            "branches": self.branches,
            "tokens": {"input": self.input_tokens, "output": self.output_tokens, "total": self.total_tokens},
            "timings": self.timings,
            "version": self.version,
            "steps": self.record.get("steps") or [],
            "error": self.error,
        }


def outcome_shares(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Share of every outcome that occurred.

    Example:
        >>> outcome_shares([Rollout(source="s", outcome="completed")])
        {'completed': 1.0}
    """
    names = [rollout.outcome for rollout in rollouts]
    return {name: names.count(name) / len(names) for name in sorted(set(names))}
