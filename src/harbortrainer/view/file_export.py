"""Export of a run as one self-contained HTML file.

Contract: the file has the overview, the first page of the heat map and of the list of trials, and the requested trials
in full with their groups. It links only to its own content and loads nothing.
"""

from dataclasses import fields, replace
from pathlib import Path
from urllib.parse import parse_qsl

from markupsafe import Markup

from harbortrainer.errors import UserError, choice_advice
from harbortrainer.runs.durable import write_whole
from harbortrainer.runs.trial_row import TrialRow
from harbortrainer.view.format import plural
from harbortrainer.view.pages import FileLinks, RunPages, render_file
from harbortrainer.view.queries import AddressError, IndexedRun, TrialFilter

MAX_TURNS = 40
"""Most turns of a trial in the file."""


def export_run(store: IndexedRun, file: Path, *, trials: int, only: str = "") -> str:
    """Write the file. Returns a one-line summary of its content.

    Args:
        store: The run.
        file: Target file; an existing file is replaced.
        trials: Number of trials in full.
        only: Filter in the form of an address (`kind=train&reward=0&sort=-tokens`). Empty: the newest training trials,
            or the newest trials of an evaluation.

    Raises:
        UserError: The file cannot be written, or `only` is invalid.
    """
    query = query_of(only) or ({"kind": "train"} if store.cells("train") else {})
    lines = first_trials(store, TrialFilter.read(query), trials)
    groups = list(dict.fromkeys(line.group for line in lines if line.group))
    links = FileLinks([line.trial for line in lines], groups)
    pages, head = RunPages(store, links), store.head()
    sections: list[tuple[str, Markup]] = [("overview", pages.overview({})[1]), ("tasks", pages.tasks({})[1])]
    sections.append(("trials", pages.trials(query)[1]))
    sections += [(links.group(name)[1:], pages.group({}, name)[1]) for name in groups]
    sections += [(links.trial(line.trial)[1:], pages.trial({}, line.trial, MAX_TURNS)[1]) for line in lines]
    text = render_file(head.name, sections, head, links)
    try:
        write_whole(file, text)
    except OSError as error:
        raise UserError(
            f"cannot be written ({error.strerror})", where=str(file), do="pass another file with --export"
        ) from None
    return f"{file}: {plural(len(lines), 'trial')} of {head.name} in full ({len(text) / 1e6:.1f} MB)"


def query_of(only: str) -> dict[str, str]:
    """Parse a filter. Raises `AddressError` for an unknown parameter, which would otherwise select every trial."""
    query = dict(parse_qsl(only.removeprefix("?"), keep_blank_values=True))
    known = [field.name for field in fields(TrialFilter)]
    for name in query:
        if name not in known:
            raise AddressError(f"{name[:40]!r} is not a filter", where="--only", do=choice_advice(name, known))
    return query


def first_trials(store: IndexedRun, wanted: TrialFilter, trials: int) -> list[TrialRow]:
    """Return the first `trials` matching trials."""
    found: list[TrialRow] = []
    page = 1
    while len(found) < trials:
        lines, _ = store.find(replace(wanted, page=page))
        if not lines:
            break
        found, page = [*found, *lines], page + 1
    return found[:trials]
