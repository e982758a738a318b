"""An evaluation's report in words: lines for a terminal, and a page of Markdown. Pure."""

from collections.abc import Mapping, Sequence

from harbortrainer.evaluation.eval_report import EvalReport

MOST_TASKS = 20
"""Tasks that a terminal is shown; the page has all."""
WORD = 15


def as_lines(report: EvalReport) -> list[str]:
    """The report for a terminal."""
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
    tags = [f"  {found}  {found.tasks} tasks  {tag}" for tag, found in report.by_tag.items()]
    return [*lines, *(["mean reward by tag:", *tags] if tags else []), *_worst_tasks(report)]


def as_markdown(report: EvalReport) -> str:
    """The report as a page."""
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
    parts = [f"{report.tasks_dir}: {report.tasks} x {report.attempts}", f"{report.mean.attempts} trials graded"]
    if report.lost:
        parts.append(f"{sum(report.lost.values())} lost and not counted ({_counts(report.lost)})")
    if report.missing:
        parts.append(f"{report.missing} not played yet")
    unknown = report.tasks - report.mean.tasks
    return ", ".join([*parts, *([f"{unknown} tasks without a graded trial"] if unknown else [])])


def _how(report: EvalReport) -> str:
    found = report.mean
    if found.low is None:
        return f"(no interval over {found.tasks} tasks)"
    kind = report.interval if found.stderr else "exact"
    return f"(95 %, {kind} over {found.tasks} tasks; standard error {_number(found.stderr)})"


def _passes(report: EvalReport) -> list[str]:
    words: dict[str, list[str]] = {}
    for found in report.passes:
        few = f" over {found.estimate.tasks} tasks" if found.estimate.tasks < report.mean.tasks else ""
        words.setdefault(found.name[:5], []).append(f"{found.name[5:]}: {found.estimate}{few}")
    return [_line(f"{kind}k", "  ".join(values)) for kind, values in words.items()]


def _trial(report: EvalReport) -> str:
    trials = sum(report.outcomes.values())
    parts = [f"{report.turns:.1f} turns"] if report.turns is not None else []
    if report.sampled_tokens and trials:
        each = f"{report.prompt_tokens / trials:.0f} prompt and {report.sampled_tokens / trials:.0f} sampled tokens"
        parts.append(each)
    parts += [f"{took:.1f} s {phase.replace('_', ' ')}" for phase, took in report.seconds.items()]
    return ", ".join(parts) or "nothing was measured"


def _worst_tasks(report: EvalReport) -> list[str]:
    scores = sorted(report.by_task.values(), key=lambda score: (score.mean_reward is not None, score.mean_reward or 0))
    shown = [
        f"  {_number(s.mean_reward):>6}  {s.solved}/{s.graded} solved{f', {s.lost} lost' if s.lost else ''}  {s.task}"
        for s in scores[:MOST_TASKS]
    ]
    more = [f"  ... and {len(scores) - MOST_TASKS} more in report.md"] if len(scores) > MOST_TASKS else []
    return ["tasks, hardest first:", *shown, *more] if shown else []


def _number(value: float | None) -> str:
    return "none" if value is None else f"{value:.3f}"


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in counts.items()) or "none"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(cell.replace('|', '/') for cell in row)} |\n" for row in lines)
