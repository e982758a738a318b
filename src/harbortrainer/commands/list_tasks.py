"""`harbortrainer tasks list`: what the tasks of a set ask for, and what is known of them."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from harbortrainer.config.task_source import task_source
from harbortrainer.errors import UserError
from harbortrainer.tasks.measured_rates import read_rates
from harbortrainer.tasks.task_check import checked_in
from harbortrainer.tasks.task_row import TaskRow, task_row
from harbortrainer.tasks.task_store import load_source

WIDE = 240
"""Columns of a table that no terminal shows."""


def list_tasks(text: str, *, difficulty: Path | None, as_json: bool) -> int:
    """Print a row a task; 1 when tasks cannot be read, which are told.

    Args:
        text: A source of tasks.
        difficulty: Measured pass rates, as `harbortrainer eval --difficulty` writes them.
        as_json: One JSON object for a program, in place of the table.
    """
    rates = {} if difficulty is None else read_rates(difficulty).tasks
    unread: list[UserError] = []
    checked, rows = checked_in(), []
    for task in load_source(task_source(text), skip=unread.append, tell=tell):
        try:
            rows.append(task_row(task, checked, rates))
        except UserError as error:
            unread.append(error)
    if as_json:
        found = {"tasks": [row.model_dump() for row in rows], "unreadable": [str(error) for error in unread]}
        print(json.dumps(found, indent=1))
    else:
        show(rows, measured=difficulty is not None)
        for error in unread:
            print(f"BAD {error}")
    return 1 if unread else 0


def tell(line: str) -> None:
    """Said where it is in the way of no program."""
    print(line, file=sys.stderr)


def show(rows: Sequence[TaskRow], *, measured: bool) -> None:
    """The rows as a table."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    heads = ["task", "steps", "verifier", "image", "network", "resources", "agent s", "verifier s", "checked"]
    for head in [*heads, *["pass rate"] * measured]:
        table.add_column(head, justify="right" if head in ("steps", "agent s", "verifier s", "pass rate") else "left")
    for row in rows:
        table.add_row(*map(plain, cells(row)[: len(table.columns)]))
    Console(markup=False, width=None if sys.stdout.isatty() else WIDE).print(table)
    print(f"{len(rows)} tasks, {sum(bool(row.checked) for row in rows)} checked")


def cells(row: TaskRow) -> list[str]:
    """What stands in a row's columns."""
    sizes = {"cpu": row.cpus, "MB": row.memory_mb, "MB disk": row.storage_mb, "gpu": row.gpus}
    rate = "-" if row.pass_rate is None else f"{row.pass_rate:.2f} of {row.attempts}"
    return [
        row.name,
        str(row.steps),
        row.verifier,
        row.image or "-",
        row.network,
        ", ".join(f"{size} {unit}" for unit, size in sizes.items() if size is not None) or "-",
        "-" if row.agent_s is None else f"{row.agent_s:g}",
        f"{row.verifier_s:g}",
        ", ".join(row.checked) or "no",
        rate,
    ]


def plain(text: str) -> str:
    """Names are others' data: nothing in them reaches the terminal as a command."""
    return "".join(sign if sign.isprintable() else "?" for sign in text)
