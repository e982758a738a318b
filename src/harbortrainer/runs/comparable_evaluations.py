"""Evaluations of a run over the same sources, and the gain between two of them, on both engines.

Means over other tasks do not compare, so the last evaluation's sources decide. The embedded engine has its evaluations
in `metrics.jsonl` and `eval/`. Those of Prime-RL are computed from its episodes, since its metrics have no interval
over tasks.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

from harbortrainer.estimates.interval import mean_reward
from harbortrainer.runs.curve import as_text, curve_of
from harbortrainer.runs.durable import read_lines
from harbortrainer.runs.folder import RunFolder
from harbortrainer.runs.prime_rl_files import evaluation_rows, metric_files
from harbortrainer.runs.provenance import evaluation_name
from harbortrainer.runs.summary import EvalResult, Gain, evaluated_sources, evaluations, gain_of, rewards_by_task
from harbortrainer.runs.trial_row import TrialRow, read_rows


def comparable_evaluations(run: RunFolder, rows: Sequence[TrialRow], step: int | None = None) -> dict[int, EvalResult]:
    """Return the evaluations with the sources of the last one, by policy version.

    Args:
        run: The run.
        rows: Its evaluation trials, if it is of Prime-RL.
        step: The last policy version that counts; None means all.
    """
    found, sources = evaluations(run), evaluated_sources(run)
    if rows:
        found, sources = _of_prime_rl(rows)
    last = max((known for known in found if step is None or known <= step), default=None)
    return {known: result for known, result in found.items() if last is not None and sources[known] == sources[last]}


def gain_between(run: RunFolder, rows: Sequence[TrialRow], first: int, step: int) -> Gain | None:
    """Return the gain of policy version `step` over version `first`; `rows` as for `comparable_evaluations`."""
    if first >= step:
        return None
    known = {version: [row for row in rows if (row.step or 0) == version] for version in (first, step)}
    return gain_of(*(known[version] or read_rows(run.eval_file(version)) for version in (first, step)))


def evaluated_points(found: Mapping[int, EvalResult]) -> list[tuple[int, float]]:
    """Return the mean rewards of evaluations as points of a curve."""
    means = ((step, one.mean_reward) for step, one in sorted(found.items()))
    return [(step, mean) for step, mean in means if mean is not None]


def prime_rl_result_lines(folder: Path) -> list[str]:
    """Format the curve, the first and last evaluation and the gain of a Prime-RL run; empty without an evaluation."""
    run, rows = RunFolder(folder), evaluation_rows(folder)
    found = comparable_evaluations(run, rows)
    if not rows or not found:
        return []
    first, last, name = min(found), max(found), evaluation_name(folder)
    curve = curve_of([row for file in metric_files(folder) for row in read_lines(file)], name)
    curve.evaluated = evaluated_points(found)
    after = f", {found[last]} at version {last}" if last > first else ""
    gain = gain_between(run, rows, first, last)
    return [
        as_text(curve),
        f"{name} mean reward: {found[first]} at policy version {first}{after}",
        *([f"{name} gain: {gain}"] if gain is not None else []),
    ]


def _of_prime_rl(rows: Sequence[TrialRow]) -> tuple[dict[int, EvalResult], dict[int, set[str]]]:
    """Return the evaluations and their sources, by policy version."""
    by_version: dict[int, list[TrialRow]] = {}
    for row in rows:
        by_version.setdefault(row.step or 0, []).append(row)
    results = {version: EvalResult.of(mean_reward(rewards_by_task(own))) for version, own in by_version.items()}
    return results, {version: {row.source for row in own} for version, own in by_version.items()}
