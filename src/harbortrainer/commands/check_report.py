"""The verdicts of `harbortrainer tasks check` as files: JSON for programs, Markdown for people."""

import json
from collections.abc import Sequence
from pathlib import Path

from harbortrainer.runs.durable import write_whole
from harbortrainer.tasks.verdict import NOP, ORACLE, CheckedTrial, Verdict


def line(verdict: Verdict) -> str:
    """One verdict as the terminal shows it."""
    word = "BAD " if verdict.problem else "WEAK" if verdict.forged else "ok  "
    return f"{word} {verdict.task}  {findings(verdict)}".rstrip()


def findings(verdict: Verdict) -> str:
    """What was found of one task, in words; empty when nothing was."""
    return "; ".join(filter(None, (verdict.problem, forged(verdict), verdict.note)))


def forged(verdict: Verdict) -> str:
    """The cheats that got a reward, with it."""
    got = ", ".join(f"{cheat} ({reward:g})" for cheat, reward in verdict.forged.items())
    return f"a reward without a solution: {got}" if got else ""


def write_json(file: Path, verdicts: Sequence[Verdict], unread: Sequence[str], environment: str) -> None:
    """All verdicts with all their trials."""
    told = {
        "environment": environment,
        "fit": sum(not verdict.problem for verdict in verdicts),
        "tasks": [verdict.model_dump(mode="json") for verdict in verdicts],
        "unreadable": list(unread),
    }
    file.parent.mkdir(parents=True, exist_ok=True)
    write_whole(file, json.dumps(told, indent=1) + "\n")


def write_markdown(file: Path, verdicts: Sequence[Verdict], unread: Sequence[str], environment: str) -> None:
    """A table: task, verdict, rewards, seconds of each phase, findings."""
    fit = sum(not verdict.problem for verdict in verdicts)
    lines = [
        f"# {fit} of {len(verdicts) + len(unread)} tasks are fit to train on (sandboxes: {environment})",
        "",
        "Seconds are means over the oracle's trials (nop's where there is no solution).",
        "",
        "| task | | oracle | nop | sandbox s | agent s | verifier s | findings |",
        "|---|---|---|---|---|---|---|---|",
        *(_row(verdict) for verdict in verdicts),
        *(f"| | BAD | | | | | | {_cell(what)} |" for what in unread),
    ]
    file.parent.mkdir(parents=True, exist_ok=True)
    write_whole(file, "\n".join(lines) + "\n")


def _row(verdict: Verdict) -> str:
    took = verdict.seconds
    phases = (took.environment_setup, took.agent_execution, took.verifier)
    cells = (
        verdict.task,
        line(verdict).split()[0],
        _rewards(verdict.of(ORACLE)),
        _rewards(verdict.of(NOP)),
        *("" if seconds is None else f"{seconds:.2f}" for seconds in phases),
        findings(verdict),
    )
    return f"| {' | '.join(map(_cell, cells))} |"


def _rewards(trials: Sequence[CheckedTrial]) -> str:
    return ", ".join("none" if trial.reward is None else f"{trial.reward:g}" for trial in trials)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")
