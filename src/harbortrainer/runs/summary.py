"""The summary of a run, as `summary.json` and as text; written at the end and at every graceful stop."""

import json
from collections import Counter
from collections.abc import Iterable
from typing import Literal, Self

from pydantic import BaseModel, Field

from harbortrainer.estimates.interval import Estimate
from harbortrainer.estimates.paired import paired_difference
from harbortrainer.runs.checkpoints import Progress
from harbortrainer.runs.curve import as_png, as_text, curve_of
from harbortrainer.runs.display import Display, plural
from harbortrainer.runs.durable import finite, read_lines, write_whole
from harbortrainer.runs.folder import RunFolder
from harbortrainer.runs.provenance import evaluated_training_tasks, evaluation_name
from harbortrainer.runs.trial_row import TrialRow, read_rows

type Status = Literal["finished", "interrupted", "stopped"]


class EvalResult(BaseModel):
    """Mean reward of one evaluation over tasks, with its confidence interval (`estimates/interval.py`)."""

    mean_reward: float | None
    """Mean of the tasks' means; null if no trial was graded."""
    n: int
    """Number of graded trials; trials that failed for reasons other than the policy are not graded."""
    stderr: float | None
    """Standard error of the mean, over tasks; null with fewer than two tasks."""
    tasks: int | None = None
    """Number of tasks with a graded trial, a task of two sources twice; null in runs of old releases."""
    low: float | None = None
    """Lower end of the mean's 95 % interval; null if it is unknown."""
    high: float | None = None
    """Upper end of the interval."""

    @classmethod
    def of(cls, found: Estimate) -> Self:
        """Convert an estimate."""
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
        of = f"{plural(self.tasks, 'task')}, {plural(self.n, 'trial')}" if self.tasks else f"n={self.n}"
        return f"{self.mean_reward:.3f}{spread} ({of})"


class Gain(BaseModel):
    """Difference of the last evaluation from the first, on the tasks of both (`estimates/paired.py`)."""

    mean: float
    """Mean over tasks of the difference of the tasks' mean rewards."""
    low: float | None
    """Lower end of its 95 % interval; null if it is unknown."""
    high: float | None
    """Upper end of the interval."""
    tasks: int
    """Number of compared tasks; a task of two sources counts twice."""

    def __str__(self) -> str:
        known = self.low is not None and self.high is not None
        spread = f" [{self.low:+.3f}, {self.high:+.3f}]" if known else ""
        tasks = f"{self.tasks} task{'s' * (self.tasks != 1)}"
        return f"{self.mean:+.3f}{spread} ({'95 % interval, ' * known}paired over {tasks})"


class Summary(BaseModel):
    """The results of a run."""

    engine: str
    """The engine: `local` or `prime-rl`."""
    model: str
    """The trained model, as named in the config."""
    status: Status = "finished"
    """`interrupted` on request, `stopped` by an error; `--resume` continues after `steps` in both cases."""
    steps: int
    """Number of updates."""
    wall_s: float
    """Seconds over all starts of this run."""
    warmup_s: float
    """Seconds of `wall_s` in the warm-up."""
    train_s: float
    """Seconds of `wall_s` between the first rollout and the last update, including evaluations."""
    trials: int
    """Number of ended trials, including evaluations."""
    outcomes: dict[str, int]
    """Number of trials by outcome."""
    eval: dict[str, EvalResult | None] = Field(default_factory=dict)
    """Held-out reward `before` and `after` training."""
    gain: Gain | None = None
    """Held-out gain of a finished run; null without two evaluations."""
    failed_check: str | None = None
    """The failure of a check of the training data, which stopped the run in the step after `steps`; else null."""
    peak_rss_mb: float
    """Peak memory of the process tree in MB."""
    seed: int
    """Random seed of the run."""

    def write(self, run: RunFolder) -> None:
        """Write `summary.json`."""
        write_whole(run.summary_file, json.dumps(finite(self.model_dump()), indent=2) + "\n")

    def lines(self, run: RunFolder) -> list[str]:
        """Format the summary as lines of text."""
        lines = [
            f"{self.steps} steps, {self.trials} trials in {self.wall_s:.0f} s "
            f"(warm-up {self.warmup_s:.0f} s, training {self.train_s:.0f} s), "
            f"peak memory {self.peak_rss_mb / 1000:.1f} GB"
        ]
        before, after = self.eval.get("before"), self.eval.get("after")
        trained, evaluated = evaluated_training_tasks(run.path)
        name = evaluation_name(run.path)
        if before is not None:
            lines.append(f"{name} mean reward: {before} before" + (f", {after} after" if after else ""))
        if self.gain is not None:
            lines.append(f"{name} gain: {self.gain}")
        if trained:
            lines.append(f"{trained} of the {plural(evaluated, 'evaluation task')} are training tasks")
        failed = ", ".join(f"{name} {count}" for name, count in self.outcomes.items() if name != "completed")
        if failed:
            lines.append(f"outcomes other than completed: {failed}")
        if self.status == "interrupted":
            lines.append(f"stopped after step {self.steps}; add --resume to the same command to continue")
        return [*lines, f"all results are in {run.path}"]


KEYS = tuple(EvalResult.model_fields)


def evaluations(run: RunFolder) -> dict[int, EvalResult]:
    """Read the evaluations of a run, by step."""
    rows = [row for row in read_lines(run.metrics_file) if "eval/n" in row]
    return {row["step"]: EvalResult.model_validate({key: row.get(f"eval/{key}") for key in KEYS}) for row in rows}


def evaluated_sources(run: RunFolder) -> dict[int, set[str]]:
    """Read the names of the sources that each evaluation of a run has, by step."""
    rows = [row for row in read_lines(run.metrics_file) if "eval/n" in row]
    return {
        row["step"]: {key[len("eval/") :].partition("/all/")[0] for key in row if "/all/" in key and key[:5] == "eval/"}
        for row in rows
    }


def recorded_times(run: RunFolder) -> tuple[float, float, float]:
    """Read `wall_s`, `warmup_s` and `train_s` of the last summary, so that a run's times never decrease."""
    try:
        found = Summary.model_validate_json(run.summary_file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return 0.0, 0.0, 0.0
    return found.wall_s, found.warmup_s, found.train_s


def held_out_gain(run: RunFolder, step: int) -> Gain | None:
    """Return the gain of policy version `step` over the first one; None unless both were evaluated."""
    return gain_of(read_rows(run.eval_file(0)), read_rows(run.eval_file(step))) if step else None


def rewards_by_task(rows: Iterable[TrialRow]) -> dict[str, list[float]]:
    """Return the rewards of graded trials, by source and task: sources may play one task in other ways."""
    rewards: dict[str, list[float]] = {}
    for row in rows:
        if row.reward is not None:
            rewards.setdefault(f"{row.source}/{row.task_key or row.task}", []).append(row.reward)
    return rewards


def gain_of(before: Iterable[TrialRow], after: Iterable[TrialRow]) -> Gain | None:
    """Return the gain of one evaluation over another, from the trials of both; None if they share no graded task."""
    found = paired_difference(rewards_by_task(before), rewards_by_task(after))
    return None if found is None else Gain(mean=found.mean, low=found.low, high=found.high, tasks=found.tasks)


def summarize(
    run: RunFolder, progress: Progress, *, model: str, seed: int, status: Status, failed_check: str | None = None
) -> Summary:
    """Build the summary of a run of the embedded engine from its files and its current `progress`."""
    outcomes = Counter(row.outcome for path in sorted(run.rollouts.glob("*.jsonl")) for row in read_rows(path))
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
        gain=held_out_gain(run, progress.step) if status == "finished" else None,
        failed_check=failed_check,
        peak_rss_mb=progress.peak_rss_mb,
        seed=seed,
    )


def report_summary(summary: Summary, run: RunFolder, display: Display) -> None:
    """Write and print the summary and, for a finished run, the reward curve."""
    summary.write(run)
    if summary.status == "finished":
        curve = curve_of(read_lines(run.metrics_file), evaluation_name(run.path))
        as_png(curve, run.curve_file, run.name)
        display.line(as_text(curve))
    for line in summary.lines(run):
        display.line(line)
