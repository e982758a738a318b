"""`harbortrainer sandboxes`: list the sandboxes here and at providers, and end those that killed runs left."""

import sys
import time
from collections.abc import Sequence
from pathlib import Path

import typer

from harbortrainer.engines.prime_rl.checkout import apply_dotenv, find
from harbortrainer.engines.prime_rl.start import LABEL, LOCK
from harbortrainer.errors import RunStoppedError, UserError, clauses
from harbortrainer.runs.label import LABEL_FILE, NO_RUN, run_label
from harbortrainer.runs.locks import LOCK_FILE, refuse_in_use
from harbortrainer.sandbox.inventory import FoundSandbox, InventoryError, all_kinds, find_sandboxes, inventory

_ID_CHARS = 12
_UNITS = ((86_400, "d"), (3600, "h"), (60, "min"), (1, "s"))


def list_sandboxes(runs: Sequence[str]) -> None:
    """Print the sandboxes of these runs, or of all, with run, task, age and the state of the owner."""
    labels = [label for run in runs for label in labels_of(run)]
    found = [sandbox for sandbox in _find_all() if not runs or sandbox.run in labels]
    _print(found)
    ended = sum(sandbox.state == "ended" for sandbox in found)
    print(f"{len(found)} sandboxes, {ended} of ended runs")
    if ended:
        print("end these: harbortrainer sandboxes end --all")


def end_sandboxes(runs: Sequence[str], *, all_ended: bool, yes: bool) -> None:
    """End sandboxes whose owner does not run any more.

    Args:
        runs: Labels or folders of runs. Their sandboxes are ended too if it is not known here whether the owner runs.
        all_ended: Instead of naming runs, end the sandboxes of all owners that have ended.
        yes: Do not ask.

    Raises:
        UserError: A named run is active, or neither runs nor `all_ended` is given, or both.
        RunStoppedError: Some could not be ended.
    """
    if bool(runs) == all_ended:
        raise UserError("name runs or pass --all", where="command line", do="see `harbortrainer sandboxes list`")
    for run in runs:
        if run == NO_RUN:
            raise UserError("these sandboxes belong to no run", where=run, do="end the ended ones with --all")
        for lock in (LOCK_FILE, LOCK):
            refuse_in_use(Path(run), lock)
    labels = [label for run in runs for label in labels_of(run)]
    found = [sandbox for sandbox in _find_all() if all_ended or sandbox.run in labels]
    states = ("ended",) if all_ended else ("ended", "unknown")
    if active := sorted({sandbox.run for sandbox in found if sandbox.state == "running"} & set(labels)):
        raise UserError("this run is active", where=active[0], do="stop it first; it ends its sandboxes")
    chosen = [sandbox for sandbox in found if sandbox.state in states]
    _print(chosen)
    if not chosen:
        print("no sandboxes to end" if all_ended else f"no sandboxes of {', '.join(runs)} to end")
        return
    if any(sandbox.state == "unknown" for sandbox in chosen):
        print("unknown: started on another machine, or before this one restarted; make sure that the run has ended")
    if yes or typer.confirm(f"End these {len(chosen)} sandboxes?"):
        _end(chosen)
        print(f"ended {len(chosen)} sandboxes")


def labels_of(run: str) -> list[str]:
    """Return the labels of a run that is named by its folder or by its label.

    Raises:
        UserError: The folder is no run's.
    """
    folder = Path(run)
    if not folder.is_dir():
        return [run]
    labels = [run_label(folder, file) for file in (LABEL_FILE, LABEL) if (folder / file).is_file()]
    if not labels:
        raise UserError("no run wrote this folder", where=run, do="see `harbortrainer sandboxes list`")
    return labels


def _find_all() -> list[FoundSandbox]:
    """Return the sandboxes of all types that can be listed; name the other types on stderr."""
    apply_dotenv()
    found: list[FoundSandbox] = []
    for kind in all_kinds():
        try:
            found += find_sandboxes(kind, pythons=_pythons())
        except InventoryError as error:
            print(f"not listed: {kind} ({error})", file=sys.stderr)
    return found


def _pythons() -> list[Path]:
    checkout = find()
    return [checkout.python] if checkout.installed else []


def _end(sandboxes: Sequence[FoundSandbox]) -> None:
    errors = []
    for kind in dict.fromkeys(sandbox.kind for sandbox in sandboxes):
        try:
            inventory(kind, _pythons()).end([sandbox.id for sandbox in sandboxes if sandbox.kind == kind])
        except InventoryError as error:
            errors.append(f"{kind}: {error}")
    if errors:
        raise RunStoppedError(f"some sandboxes were not ended: {clauses(*errors)}", do="run the command again")


def _print(sandboxes: Sequence[FoundSandbox]) -> None:
    rows = [("TYPE", "ID", "RUN", "TASK", "AGE", "STATE")] if sandboxes else []
    for one in sandboxes:
        rows.append((one.kind, one.id[:_ID_CHARS], one.run, _printable(one.task), age(one.since), one.state))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def _printable(text: str) -> str:
    return "".join(char for char in text if char.isprintable()) or "-"


def age(since: str) -> str:
    """Return the time since then in its largest unit; "-" if it is unknown.

    Args:
        since: Seconds since 1970, as text.
    """
    if not since.isdigit():
        return "-"
    seconds = max(0, int(time.time()) - int(since))
    size, unit = next(((size, unit) for size, unit in _UNITS if seconds >= size), _UNITS[-1])
    return f"{seconds // size} {unit}"
