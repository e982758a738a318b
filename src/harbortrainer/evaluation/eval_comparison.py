"""Paired comparison of two evaluations: which policy is better, how certain that is, and what the set can detect.

Contract: tasks are paired by content, so a task that has changed between the evaluations is not compared. Notes report
other differences between the evaluations.
"""

from dataclasses import dataclass
from statistics import fmean

from harbortrainer.errors import UserError
from harbortrainer.estimates.interval import IntervalKind
from harbortrainer.estimates.paired import POWER, PairedDifference, paired_difference
from harbortrainer.evaluation.eval_folder import EvalFolder
from harbortrainer.evaluation.report import rewards_of
from harbortrainer.runs.folder import first_difference_of
from harbortrainer.runs.trial_row import TrialRow

MAX_TASKS = 5


@dataclass(frozen=True)
class EvalComparison:
    """The result of comparing two evaluations."""

    first: EvalFolder
    second: EvalFolder
    found: PairedDifference
    kind: IntervalKind
    notes: list[str]
    """Differences between the two evaluations other than the policy."""
    changed: list[tuple[str, float, float]]
    """Name and both mean rewards of each compared task, largest gain first."""

    @classmethod
    def of(cls, first: EvalFolder, second: EvalFolder, *, kind: IntervalKind = "t") -> "EvalComparison":
        """Compare two evaluations. Raises `UserError` if they have no task with graded trials in common."""
        before, after = first.rows(), second.rows()
        rewards = rewards_of(before), rewards_of(after)
        found = paired_difference(*rewards, kind=kind)
        if found is None:
            where = f"{first.path} and {second.path}"
            what = "no task has graded trials in both (tasks are compared by their content)"
            raise UserError(what, where=where, do="evaluate both policies on one task set")
        names = {row.task_key: row.task for row in [*before, *after]}
        both = [key for key, own in rewards[0].items() if own and rewards[1].get(key)]
        changed = [(names[key], fmean(rewards[0][key]), fmean(rewards[1][key])) for key in both]
        changed.sort(key=lambda task: task[1] - task[2])
        return cls(first, second, found, kind, _notes(first, second, before, after), changed)

    def lines(self) -> list[str]:
        """Format the comparison as lines of text."""
        found = self.found
        smallest = "unknown" if found.min_detectable is None else f"a difference of {found.min_detectable:.3f} or more"
        return [
            f"A               {found.first}  {self.first.spec.policy} ({self.first.path})",
            f"B               {found.second}  {self.second.spec.policy} ({self.second.path})",
            f"compared        {found.tasks} tasks that are in both",
            *(f"note            {note}" for note in self.notes),
            f"B - A           {found.mean:+.3f} {_interval(found)} (95 %, {self.kind} over tasks), p {_p(found.p)}",
            f"                {_verdict(found)}",
            f"could show      {smallest} (shown {POWER:.0%} of the time)",
            *self._tasks(),
        ]

    def _tasks(self) -> list[str]:
        gained = [line for line in self.changed if line[2] > line[1]][:MAX_TASKS]
        lost = [line for line in reversed(self.changed) if line[2] < line[1]][:MAX_TASKS]
        lines = [f"  {a:.3f} -> {b:.3f}  {name}" for name, a, b in [*gained, *reversed(lost)]]
        return ["largest gains and losses:", *lines] if lines else ["no task has a different mean reward"]


def _interval(found: PairedDifference) -> str:
    return "no interval" if found.low is None else f"[{found.low:+.3f}, {found.high:+.3f}]"


def _p(value: float) -> str:
    return "< 0.0001" if value < 0.0001 else f"= {value:.4f}"


def _verdict(found: PairedDifference) -> str:
    if found.low is None:
        return f"no interval can be computed over {found.tasks} tasks"
    if not found.significant:
        return "no significant difference: the interval includes 0"
    return f"B is {'better' if found.mean > 0 else 'worse'} than A"


def _notes(first: EvalFolder, second: EvalFolder, before: list[TrialRow], after: list[TrialRow]) -> list[str]:
    notes = []
    a, b = first.spec, second.spec
    for word, spec, other in (("A", a, b), ("B", b, a)):
        alone = sorted(name for name, key in spec.tasks.items() if key not in other.tasks.values())
        if alone:
            notes.append(f"{len(alone)} tasks of {word} are not in the other: {', '.join(alone[:3])}{_dots(alone)}")
    difference = first_difference_of(a.rules.model_dump(mode="json"), b.rules.model_dump(mode="json"))
    if difference is not None:
        notes.append(f"the rules differ, not only the policies: {difference}")
    for word, rows, spec in (("A", before, a), ("B", after, b)):
        graded = sum(row.graded for row in rows)
        wanted = len(spec.keys) * spec.attempts
        if graded < wanted:
            notes.append(f"{wanted - graded} of {wanted} trials of {word} are lost or missing, and not counted")
    if a.identity == b.identity:
        notes.append("A and B are the same policy")
    return notes


def _dots(names: list[str]) -> str:
    return ", ..." if len(names) > 3 else ""
