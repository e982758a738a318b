"""Reports of `harbortrainer tasks check`: a line for each verdict, a JSON file, a Markdown table, and a summary.

Invariant: the files are complete after each verdict, also after `kill -9`: each is replaced as a whole. A verdict is
formatted once, so that a large set costs a copy of its text for each verdict.
"""

import json
import os
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from harbortrainer.doctor.machine_checks import existing
from harbortrainer.errors import UserError, clauses
from harbortrainer.tasks.verdict import NOP, ORACLE, CheckedTrial, Verdict

HEADER = """
Seconds are means over the oracle's trials (nop's where there is no solution).

| task | | oracle | nop | sandbox s | agent s | verifier s | findings |
|---|---|---|---|---|---|---|---|
"""


def verdict_line(verdict: Verdict) -> str:
    """Format one verdict for the terminal."""
    return f"{verdict.word:<4} {verdict.task}  {findings_text(verdict)}".rstrip()


def lint_lines(verdict: Verdict) -> list[str]:
    """Format the findings of `harbor lint` on one task for the terminal, one line each."""
    return [f"lint {verdict.task}  {finding}" for finding in verdict.lint]


def findings_text(verdict: Verdict) -> str:
    """Describe the findings on one task; empty when there are none."""
    return clauses(*(finding.what for finding in verdict.findings))


def bad_categories(verdicts: Iterable[Verdict]) -> dict[str, int]:
    """Count the tasks that are not fit to train on by the category of their first finding, most frequent first."""
    counts = Counter(verdict.findings[0].category for verdict in verdicts if verdict.problem)
    return dict(sorted(counts.items(), key=lambda count: (-count[1], count[0])))


def fit_text(verdicts: Sequence[Verdict], of: int) -> str:
    """Describe how many of all tasks are fit to train on, and the categories of the others."""
    fit = sum(not verdict.problem for verdict in verdicts)
    counts = ", ".join(f"{category} {count}" for category, count in bad_categories(verdicts).items())
    return f"{fit} of {of} tasks are fit to train on" + (f" (not fit: {counts})" if counts else "")


class CheckReport:
    """The verdicts of a check, and the files that show them.

    Args:
        environment: Type of the sandboxes.
        total: Number of all tasks, also of those that are not checked yet.
        json_file: File for all verdicts with all their trials; None for no file.
        markdown_file: File for a table; None for no file.
    """

    def __init__(self, environment: str, total: int, json_file: Path | None, markdown_file: Path | None) -> None:
        self.environment, self.total = environment, total
        self.json_file, self.markdown_file = json_file, markdown_file
        self.verdicts: list[Verdict] = []
        self._objects: dict[str, str] = {}
        self._rows: dict[str, str] = {}

    def check_writable(self) -> None:
        """Raise `UserError` when a file cannot be written. Call it before the trials run."""
        for flag, file in (("--json", self.json_file), ("--markdown", self.markdown_file)):
            if file is not None and (file.is_dir() or not os.access(existing(file.parent), os.W_OK)):
                raise UserError(
                    "cannot be written", where=f"{flag} {file}", do="name a file in a folder that you can write to"
                )

    def add(self, verdicts: Sequence[Verdict]) -> None:
        """Add verdicts and write the files."""
        self.verdicts += verdicts
        for verdict in verdicts:
            if self.json_file is not None:
                self._objects[verdict.task] = json.dumps(verdict.model_dump(mode="json"))
            if self.markdown_file is not None:
                self._rows[verdict.task] = _row(verdict)
        if self.json_file is not None:
            _replace(self.json_file, self._json())
        if self.markdown_file is not None:
            title = f"# {fit_text(self.verdicts, self.total)} (sandboxes: {self.environment})\n"
            _replace(self.markdown_file, title + HEADER + "".join(self._rows[name] for name in sorted(self._rows)))

    def _json(self) -> str:
        head = {
            "environment": self.environment,
            "total": self.total,
            "fit": sum(not verdict.problem for verdict in self.verdicts),
            "not_fit": bad_categories(self.verdicts),
        }
        tasks = ",\n".join(self._objects[name] for name in sorted(self._objects))
        return f'{json.dumps(head, indent=1).removesuffix("\n}")},\n "tasks": [\n{tasks}\n]\n}}\n'

    def print_summary(self) -> None:
        """Print the last line."""
        fit = [verdict for verdict in self.verdicts if not verdict.problem]
        cheated, doubtful = (
            sum(bool(verdict.forged) for verdict in fit),
            sum(len(verdict.doubts) > bool(verdict.forged) for verdict in fit),
        )
        more = f"; of these, {cheated} reward{'s' * (cheated == 1)} a cheat" if cheated else ""
        more += f"; of these, {doubtful} ha{'s' if doubtful == 1 else 've'} a doubtful reward" if doubtful else ""
        print(fit_text(self.verdicts, self.total) + more)


def _replace(file: Path, text: str) -> None:
    """Replace a file as a whole. It is not synced to disk: `outputs/verdicts.jsonl` is."""
    file.parent.mkdir(parents=True, exist_ok=True)
    draft = file.with_name(f".{file.name}.part")
    draft.write_text(text, encoding="utf-8")
    draft.replace(file)


def _row(verdict: Verdict) -> str:
    took = verdict.seconds
    phases = (took.environment_setup, took.agent_execution, took.verifier)
    cells = (
        verdict.task,
        verdict.word,
        _rewards(verdict.of(ORACLE)),
        _rewards(verdict.of(NOP)),
        *("" if seconds is None else f"{seconds:.2f}" for seconds in phases),
        clauses(*(f"{finding.category}: {finding.what}" for finding in verdict.findings), *verdict.lint),
    )
    return f"| {' | '.join(map(_cell, cells))} |\n"


def _rewards(trials: Sequence[CheckedTrial]) -> str:
    return ", ".join("none" if trial.reward is None else f"{trial.reward:g}" for trial in trials)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")
