"""`summary.json`: a run in one small file, written at its end and at every clean stop, and the same in words."""

import json
from collections import Counter
from typing import Literal, Self

from pydantic import BaseModel, Field

from harbortrainer.estimates.interval import Estimate
from harbortrainer.runs.curve import as_png, as_text, curve_of
from harbortrainer.runs.display import Display
from harbortrainer.runs.durable import finite, read_lines, write_whole
from harbortrainer.runs.folder import RunFolder
from harbortrainer.runs.progress import Progress

type Status = Literal["finished", "interrupted", "stopped"]


class EvalResult(BaseModel):
    """Mean reward of one evaluation, each task counting the same, and how sure it is (`estimates/interval.py`)."""

    mean_reward: float | None
    """Mean of the tasks' means; null when no trial was graded."""
    n: int
    """Trials that were graded. A trial that failed for no fault of the policy is not one of them."""
    stderr: float | None
    """Standard error of the mean, over tasks; null under two tasks."""
    tasks: int | None = None
    """Tasks with a graded trial; null in runs of a release that did not count them."""
    low: float | None = None
    """Lower end of the mean's 95 % interval; null where none can be told."""
    high: float | None = None
    """Its upper end."""

    @classmethod
    def of(cls, found: Estimate) -> Self:
        """The result of this estimate."""
        return cls(
            mean_reward=found.mean,
            n=found.attempts,
            stderr=found.stderr,
            tasks=found.tasks,
            low=found.low,
            high=found.high,
        )

    def __str__(self) -> str:
        if self.mean_reward is None:
            return "none"
        known = self.low is not None and self.high is not None
        spread = f" [{self.low:.3f}, {self.high:.3f}]" if known else ""
        of = f"{self.tasks} tasks, {self.n} trials" if self.tasks else f"n={self.n}"
        return f"{self.mean_reward:.3f}{spread} ({of})"


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

    def lines(self, run: RunFolder) -> list[str]:
        """The summary in words."""
        lines = [
            f"{self.steps} steps, {self.trials} trials in {self.wall_s:.0f} s "
            f"(making the policy {self.warmup_s:.0f} s, training {self.train_s:.0f} s), "
            f"peak memory {self.peak_rss_mb / 1000:.1f} GB"
        ]
        before, after = self.eval.get("before"), self.eval.get("after")
        if before is not None:
            lines.append(f"held-out mean reward: {before} before" + (f", {after} after" if after else ""))
        failed = ", ".join(f"{name} {count}" for name, count in self.outcomes.items() if name != "completed")
        if failed:
            lines.append(f"outcomes other than completed: {failed}")
        if self.status == "interrupted":
            lines.append(f"stopped after step {self.steps}; add --resume to the same command to go on")
        return [*lines, f"everything is in {run.path}"]


KEYS = tuple(EvalResult.model_fields)


def evaluations(run: RunFolder) -> dict[int, EvalResult]:
    """The evaluations that were made, by the step they came after."""
    rows = [row for row in read_lines(run.metrics_file) if "eval/n" in row]
    return {row["step"]: EvalResult.model_validate({key: row.get(f"eval/{key}") for key in KEYS}) for row in rows}


def spent(run: RunFolder) -> tuple[float, float]:
    """Seconds in all and seconds of training that the last summary counts; a run's time never falls."""
    try:
        found = Summary.model_validate_json(run.summary_file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return 0.0, 0.0
    return found.wall_s, found.train_s


def summarize(run: RunFolder, progress: Progress, *, model: str, seed: int, status: Status) -> Summary:
    """The summary of a run of the embedded engine, from what it wrote; `progress`: up to now."""
    outcomes = Counter(row["outcome"] for path in sorted(run.rollouts.glob("*.jsonl")) for row in read_lines(path))
    results = evaluations(run)
    return Summary(
        engine="local",
        model=model,
        status=status,
        steps=progress.step,
        wall_s=progress.wall_s,
        warmup_s=progress.warmup_s,
        train_s=progress.train_s,
        trials=sum(outcomes.values()),
        outcomes=dict(sorted(outcomes.items())),
        eval={"before": results.get(0), "after": results.get(progress.step) if status == "finished" else None},
        peak_rss_mb=progress.peak_rss_mb,
        seed=seed,
    )


def show(summary: Summary, run: RunFolder, display: Display) -> None:
    """Write the summary and, for a finished run, the curve, and show them."""
    summary.write(run)
    if summary.status == "finished":
        curve = curve_of(read_lines(run.metrics_file))
        as_png(curve, run.curve_file, run.name)
        display.line(as_text(curve))
    for line in summary.lines(run):
        display.line(line)
