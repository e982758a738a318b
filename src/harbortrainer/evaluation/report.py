"""The report of an evaluation: its metrics, and their text for the terminal and as Markdown. Pure functions.

Invariant: all metrics are over graded trials, except the counts of outcomes, the tokens and the cost. Lost trials are
counted separately.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Self

from pydantic import BaseModel

from harbortrainer.config.run_sections import Prices
from harbortrainer.estimates.interval import SOLVED, Estimate, IntervalKind, RepeatedPass, mean_reward, repeated_passes
from harbortrainer.evaluation.eval_folder import EvalSpec
from harbortrainer.runs.display import plural
from harbortrainer.runs.trial_row import TrialRow
from harbortrainer.tasks.measured_rates import MeasuredRate, MeasuredRates


class TaskScore(BaseModel):
    """Scores of one task."""

    task: str
    graded: int
    """Number of graded attempts."""
    lost: int
    """Number of attempts that could not be graded."""
    mean_reward: float | None
    """Mean reward of the graded attempts."""
    solved: int
    """Number of graded attempts with the full reward."""


class EvalReport(BaseModel):
    """Metrics of one evaluation."""

    policy: str
    tasks_dir: str
    tasks: int
    """Number of tasks."""
    attempts: int
    """Attempts per task."""
    missing: int
    """Number of trials that have not run yet."""
    lost: dict[str, int]
    """Number of trials without a grade, by outcome: infrastructure failures, never counted as 0."""
    interval: IntervalKind
    mean: Estimate
    passes: list[RepeatedPass]
    by_tag: dict[str, Estimate]
    by_task: dict[str, TaskScore]
    """Scores by content key."""
    outcomes: dict[str, int]
    """Number of all trials by outcome."""
    turns: float | None
    """Mean turns of the graded trials."""
    seconds: dict[str, float]
    """Mean seconds of the graded trials, by phase; `total` is the whole trial."""
    trials: int
    """Number of all trials; a repeated attempt has several."""
    prompt_tokens: int
    """Prompt tokens of all trials, as counted by the model's server."""
    sampled_tokens: int
    cost_usd: float | None
    """Cost of all trials, if prices are given."""

    @classmethod
    def of(
        cls,
        spec: EvalSpec,
        rows: Sequence[TrialRow],
        *,
        kind: IntervalKind = "t",
        tags: Mapping[str, Sequence[str]] | None = None,
        prices: Prices | None = None,
        all_rows: Sequence[TrialRow] | None = None,
    ) -> Self:
        """Return the report on these trials.

        Args:
            spec: The evaluation.
            rows: The last trial of each attempt.
            kind: Kind of the confidence intervals.
            tags: Tags of each task, by key.
            prices: Prices of tokens, if known.
            all_rows: Every trial, for tokens and cost: a repeated attempt has several. By default `rows`.
        """
        graded, rewards = [row for row in rows if row.graded], rewards_of(rows)
        paid = rows if all_rows is None else all_rows
        prompt, sampled = (sum(getattr(row, name) for row in paid) for name in ("prompt_tokens", "sampled_tokens"))
        return cls(
            policy=spec.policy,
            tasks_dir=spec.tasks_dir,
            tasks=len(spec.keys),
            attempts=spec.attempts,
            missing=len(spec.keys) * spec.attempts - len(rows),
            lost=_counted(row for row in rows if not row.graded),
            interval=kind,
            mean=mean_reward(rewards, kind=kind),
            passes=repeated_passes(rewards, kind=kind),
            by_tag=_by_tag(rewards, tags or {}, kind),
            by_task={key: _score(name, [r for r in rows if r.task_key == key]) for name, key in spec.tasks.items()},
            outcomes=_counted(rows),
            turns=fmean(row.turns for row in graded) if graded else None,
            seconds=_seconds(graded),
            trials=len(paid),
            prompt_tokens=prompt,
            sampled_tokens=sampled,
            cost_usd=prices.cost(prompt_tokens=prompt, sampled_tokens=sampled) if prices else None,
        )

    def rates(self) -> MeasuredRates:
        """Return the measured pass rate of each task with a graded attempt."""
        measured = {
            key: MeasuredRate(
                name=score.task,
                attempts=score.graded,
                pass_rate=score.solved / score.graded,
                mean_reward=score.mean_reward,
            )
            for key, score in self.by_task.items()
            if score.mean_reward is not None
        }
        return MeasuredRates(policy=self.policy, tasks=measured)


def rewards_of(rows: Sequence[TrialRow]) -> dict[str, list[float]]:
    """Return the rewards of the graded attempts at each task, by its key; empty for a task without a graded one."""
    rewards: dict[str, list[float]] = {}
    for row in rows:
        own = rewards.setdefault(row.task_key, [])
        own += [row.reward] if row.reward is not None else []
    return rewards


def _score(name: str, rows: Sequence[TrialRow]) -> TaskScore:
    rewards = [row.reward for row in rows if row.reward is not None]
    return TaskScore(
        task=name,
        graded=len(rewards),
        lost=len(rows) - len(rewards),
        mean_reward=fmean(rewards) if rewards else None,
        solved=sum(reward >= SOLVED for reward in rewards),
    )


def _by_tag(
    rewards: Mapping[str, list[float]], tags: Mapping[str, Sequence[str]], kind: IntervalKind
) -> dict[str, Estimate]:
    names = sorted({tag for own in tags.values() for tag in own})
    members = {tag: {key: rewards[key] for key in rewards if tag in tags.get(key, ())} for tag in names}
    return {tag: mean_reward(own, kind=kind) for tag, own in members.items() if any(own.values())}


def _counted(rows) -> dict[str, int]:
    return {str(outcome): count for outcome, count in Counter(row.outcome for row in rows).most_common()}


def _seconds(rows: Sequence[TrialRow]) -> dict[str, float]:
    phases = {phase for row in rows for phase in row.timings}
    return {phase: fmean(row.timings[phase] for row in rows if phase in row.timings) for phase in sorted(phases)}


MAX_TASKS = 20
"""Most tasks in the terminal; report.md has all."""
WORD = 15


def as_lines(report: EvalReport) -> list[str]:
    """Format the report for a terminal."""
    lines = [
        _line("policy", report.policy),
        _line("tasks", _played(report)),
        _line("mean reward", f"{report.mean} {_how(report)}"),
        *_passes(report),
        _line("outcomes", _counts(report.outcomes)),
        _line("a trial", _trial(report)),
    ]
    if report.cost_usd is not None:
        lines.append(_line("cost", f"{report.cost_usd:.4f} USD in all"))
    tags = [f"  {found}  {plural(found.tasks, 'task')}  {tag}" for tag, found in report.by_tag.items()]
    return [*lines, *(["mean reward by tag:", *tags] if tags else []), *_worst_tasks(report)]


def as_markdown(report: EvalReport) -> str:
    """Format the report as Markdown."""
    head = "\n".join(f"    {line}" for line in as_lines(report)[: -len(_worst_tasks(report)) or None])
    tasks = [
        [s.task, f"{s.graded}", f"{s.lost}", f"{s.solved}", _number(s.mean_reward)] for s in report.by_task.values()
    ]
    parts = [f"# {report.policy}\n\n{head}\n", _table(["task", "graded", "lost", "solved", "mean reward"], tasks)]
    if report.by_tag:
        tags = [[tag, f"{found.tasks}", str(found)] for tag, found in report.by_tag.items()]
        parts.append(_table(["tag", "tasks", "mean reward"], tags))
    return "\n".join(parts)


def _line(word: str, text: str) -> str:
    return f"{word:{WORD}} {text}"


def _played(report: EvalReport) -> str:
    graded = f"{plural(report.mean.attempts, 'trial')} graded"
    parts = [f"{report.tasks_dir}: {report.tasks} x {report.attempts}", graded]
    if report.lost:
        parts.append(f"{sum(report.lost.values())} lost and not counted ({_counts(report.lost)})")
    if report.missing:
        parts.append(f"{report.missing} not run yet")
    unknown = report.tasks - report.mean.tasks
    return ", ".join([*parts, *([f"{plural(unknown, 'task')} without a graded trial"] if unknown else [])])


def _how(report: EvalReport) -> str:
    found = report.mean
    if found.low is None:
        return f"(no interval over {plural(found.tasks, 'task')})"
    kind = report.interval if found.stderr else "exact"
    error = f"; standard error {_number(found.stderr)}" if found.stderr is not None else ""
    return f"(95 %, {kind} over {plural(found.tasks, 'task')}{error})"


def _passes(report: EvalReport) -> list[str]:
    words: dict[str, list[str]] = {}
    for found in report.passes:
        few = f" over {plural(found.estimate.tasks, 'task')}" if found.estimate.tasks < report.mean.tasks else ""
        words.setdefault(found.name[:5], []).append(f"{found.name[5:]}: {found.estimate}{few}")
    return [_line(f"{kind}k", "  ".join(values)) for kind, values in words.items()]


def _trial(report: EvalReport) -> str:
    trials, parts = report.trials, [f"{report.turns:.1f} turns"] if report.turns is not None else []
    if report.sampled_tokens:
        each = f"{report.prompt_tokens / trials:.0f} prompt and {report.sampled_tokens / trials:.0f} sampled tokens"
        parts.append(each)
    parts += [f"{took:.1f} s {phase.replace('_', ' ')}" for phase, took in report.seconds.items()]
    return ", ".join(parts) or "no measurements"


def _worst_tasks(report: EvalReport) -> list[str]:
    scores = sorted(report.by_task.values(), key=lambda score: (score.mean_reward is not None, score.mean_reward or 0))
    shown = [
        f"  {_number(s.mean_reward):>6}  {s.solved}/{s.graded} solved{f', {s.lost} lost' if s.lost else ''}  {s.task}"
        for s in scores[:MAX_TASKS]
    ]
    more = [f"  ... and {len(scores) - MAX_TASKS} more in report.md"] if len(scores) > MAX_TASKS else []
    return ["tasks, hardest first:", *shown, *more] if shown else []


def _number(value: float | None) -> str:
    return "none" if value is None else f"{value:.3f}"


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in counts.items()) or "none"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(cell.replace('|', '/') for cell in row)} |\n" for row in lines)
