"""All pages that matter in one file, which needs nothing but itself: to be mailed, kept, or put beside a paper.

Contract: the overview, the heat map's first page, a page of the list of trials, as many in full as were asked for, with
their groups. What is not in the file is not linked. Nothing is loaded from anywhere.
"""

from dataclasses import replace
from pathlib import Path
from urllib.parse import parse_qsl

from markupsafe import Markup

from harbortrainer.errors import UserError
from harbortrainer.runs.durable import write_whole
from harbortrainer.view.page_links import FileLinks
from harbortrainer.view.page_writer import one_file
from harbortrainer.view.run_pages import RunPages
from harbortrainer.view.shown_trial import TrialEntry
from harbortrainer.view.spoken import several
from harbortrainer.view.trial_filter import TrialFilter
from harbortrainer.view.trial_store import TrialStore

MOST_TURNS = 40
"""Of a trial."""


def export_run(store: TrialStore, file: Path, *, trials: int, only: str = "") -> str:
    """Write the file; returns a line that says what is in it.

    Args:
        store: The run.
        file: Where to; what is there is replaced.
        trials: How many trials are in it in full.
        only: Which, as an address says it (`kind=train&reward=0&sort=-tokens`). Empty: the newest training trials, or
            the newest of an evaluation.

    Raises:
        UserError: The file cannot be written, or `only` cannot be meant.
    """
    query = dict(parse_qsl(only.removeprefix("?"))) or ({"kind": "train"} if store.cells("train") else {})
    lines = first_of(store, TrialFilter.read(query), trials)
    groups = list(dict.fromkeys(line.group for line in lines if line.group))
    links = FileLinks([line.trial for line in lines], groups)
    made, head = RunPages(store, links), store.head()
    sections: list[tuple[str, Markup]] = [("overview", made.overview({})[1]), ("tasks", made.tasks({})[1])]
    sections.append(("trials", made.trials(query)[1]))
    sections += [(links.group(name)[1:], made.group({}, name)[1]) for name in groups]
    sections += [(links.trial(line.trial)[1:], made.trial({}, line.trial, MOST_TURNS)[1]) for line in lines]
    text = one_file(head.name, sections, head, links)
    try:
        write_whole(file, text)
    except OSError as error:
        raise UserError(f"cannot be written ({error.strerror})", where=str(file), do="name another file") from None
    return f"{file}: {several(len(lines), 'trial')} of {head.name} in full, {len(text) / 1e6:.1f} MB"


def first_of(store: TrialStore, wanted: TrialFilter, trials: int) -> list[TrialEntry]:
    """The first of the trials that are asked for."""
    found: list[TrialEntry] = []
    page = 1
    while len(found) < trials:
        lines, _ = store.found(replace(wanted, page=page))
        if not lines:
            break
        found, page = [*found, *lines], page + 1
    return found[:trials]
