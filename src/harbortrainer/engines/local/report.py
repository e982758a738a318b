"""What is said and written at the end of a run."""

from collections import Counter

from harbortrainer.config.runfile import RunConfig
from harbortrainer.engines.local.checkpoint import Progress
from harbortrainer.engines.local.evaluator import evaluations
from harbortrainer.runs.curve import as_png, as_text, curve_of
from harbortrainer.runs.display import Display
from harbortrainer.runs.durable import read_lines
from harbortrainer.runs.folder import RunFolder
from harbortrainer.runs.summary import EvalResult, Status, Summary


def summarize(
    config: RunConfig, run: RunFolder, progress: Progress, *, wall_s: float, peak_rss_mb: float, status: Status
) -> Summary:
    """The summary of a run, from what it wrote."""
    outcomes = Counter(row["outcome"] for path in sorted(run.rollouts.glob("*.jsonl")) for row in read_lines(path))
    results = {row["step"]: EvalResult.model_validate(_eval_fields(row)) for row in evaluations(run)}
    return Summary(
        engine="local",
        model=config.model.name,
        status=status,
        steps=progress.step,
        wall_s=wall_s,
        warmup_s=progress.warmup_s,
        train_s=progress.train_s,
        trials=sum(outcomes.values()),
        outcomes=dict(sorted(outcomes.items())),
        eval={"before": results.get(0), "after": results.get(progress.step) if status == "finished" else None},
        peak_rss_mb=peak_rss_mb,
        seed=config.seed,
    )


def _eval_fields(row: dict[str, float]) -> dict[str, float]:
    return {name: row[f"eval/{name}"] for name in ("mean_reward", "n", "stderr")}


def report(summary: Summary, run: RunFolder, display: Display) -> None:
    """Write the summary and, for a finished run, the curve, and show them."""
    summary.write(run)
    if summary.status == "finished":
        curve = curve_of(read_lines(run.metrics_file))
        as_png(curve, run.curve_file, run.name)
        display.line(as_text(curve))
    for line in lines_of(summary, run):
        display.line(line)


def lines_of(summary: Summary, run: RunFolder) -> list[str]:
    """The summary in words."""
    lines = [
        f"{summary.steps} steps, {summary.trials} trials in {summary.wall_s:.0f} s "
        f"(making the policy {summary.warmup_s:.0f} s, training {summary.train_s:.0f} s), "
        f"peak memory {summary.peak_rss_mb / 1000:.1f} GB"
    ]
    before, after = summary.eval.get("before"), summary.eval.get("after")
    if before is not None:
        lines.append(f"held-out mean reward: {_result(before)} before" + (f", {_result(after)} after" if after else ""))
    failed = {name: count for name, count in summary.outcomes.items() if name != "completed"}
    if failed:
        lines.append("outcomes other than completed: " + ", ".join(f"{name} {count}" for name, count in failed.items()))
    if summary.status == "interrupted":
        lines.append(f"stopped after step {summary.steps}; add --resume to the same command to go on")
    lines.append(f"everything is in {run.path}")
    return lines


def _result(result: EvalResult) -> str:
    spread = f" ± {result.stderr:.3f}" if result.stderr is not None else ""
    return f"{result.mean_reward:.3f}{spread} (n={result.n})" if result.mean_reward is not None else "none"
