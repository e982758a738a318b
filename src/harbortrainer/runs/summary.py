"""`summary.json`: a run in one small file, written at its end and at every clean stop."""

import json
import math
from collections.abc import Sequence
from typing import Literal, Self

from pydantic import BaseModel, Field

from harbortrainer.runs.durable import finite, write_whole
from harbortrainer.runs.folder import RunFolder

type Status = Literal["finished", "interrupted", "stopped"]


class EvalResult(BaseModel):
    """Mean reward over the graded trials of one evaluation."""

    mean_reward: float | None
    """Mean over `n` trials; null when none was graded."""
    n: int
    """Trials that were graded. A trial that failed for no fault of the policy is not one of them."""
    stderr: float | None
    """Standard error of the mean over trials; null under two trials."""

    @classmethod
    def of(cls, rewards: Sequence[float]) -> Self:
        """The result of these rewards.

        Example:
            >>> EvalResult.of([0.0, 1.0]).mean_reward
            0.5
        """
        n = len(rewards)
        mean = sum(rewards) / n if n else None
        stderr = None
        if mean is not None and n > 1:
            stderr = math.sqrt(sum((reward - mean) ** 2 for reward in rewards) / (n - 1) / n)
        return cls(mean_reward=mean, n=n, stderr=stderr)


class Summary(BaseModel):
    """What a run came to."""

    engine: str
    """Which engine trained: `local` or `prime-rl`."""
    model: str
    """The policy that was trained, as the config names it."""
    status: Status = "finished"
    """`interrupted` on request, `stopped` because it could not go on; `--resume` goes on from `steps` in both."""
    steps: int
    """Updates that were made."""
    wall_s: float
    """Seconds in all, over every start of this run."""
    warmup_s: float
    """Seconds of them spent making the policy."""
    train_s: float
    """Seconds of them between the first rollout and the last update, evaluations included."""
    trials: int
    """Trials that ended, evaluations included."""
    outcomes: dict[str, int]
    """How they ended."""
    eval: dict[str, EvalResult | None] = Field(default_factory=dict)
    """The held-out reward `before` and `after`."""
    peak_rss_mb: float
    """The largest memory of the whole process tree at one moment."""
    seed: int
    """The seed of everything that is drawn."""

    def write(self, run: RunFolder) -> None:
        """Write `summary.json`."""
        write_whole(run.summary_file, json.dumps(finite(self.model_dump()), indent=2) + "\n")
