"""The pages of a run: what each address shows, as a title and the inside of a page."""

from collections.abc import Mapping
from urllib.parse import urlencode

from markupsafe import Markup

from harbortrainer.view.heat_map import ORDERS, ROWS, heat_map
from harbortrainer.view.overview import overview_of
from harbortrainer.view.page_links import ServerLinks
from harbortrainer.view.page_writer import body
from harbortrainer.view.shown_trial import RunHead
from harbortrainer.view.side_by_side import side_by_side
from harbortrainer.view.token_marks import COLOURS
from harbortrainer.view.trial_filter import KINDS, PAGE, AddressError, TrialFilter
from harbortrainer.view.trial_sheet_page import TURNS, trial_view
from harbortrainer.view.trial_store import TrialStore

type Page = tuple[str, Markup]


class MissingPageError(Exception):
    """An address that names a trial or a group which is not there."""


class RunPages:
    """The pages of one run.

    Args:
        store: What was read of it.
        links: Where their links lead.
    """

    def __init__(self, store: TrialStore, links: ServerLinks) -> None:
        self._store, self._links = store, links

    def overview(self, query: Mapping[str, str]) -> Page:
        """The run at a glance."""
        head = self._store.head()
        return head.name, self._body("overview.html", it=overview_of(self._store), head=head)

    def tasks(self, query: Mapping[str, str]) -> Page:
        """The heat map."""
        kinds = [kind for kind in KINDS if self._store.cells(kind)] or ["train"]
        kind = chosen(query, "kind", [*kinds, *(kind for kind in KINDS if kind not in kinds)])
        order, page, search = chosen(query, "sort", ORDERS), page_of(query), query.get("search", "")
        found = heat_map(self._store.cells(kind), kind=kind, order=order, page=page, search=search)
        head = self._store.head()
        return "Tasks", self._body(
            "tasks.html",
            it=found,
            kinds=kinds,
            kind=kind,
            order=order,
            orders=ORDERS,
            page=page,
            search=search,
            pages=pages(found.tasks, ROWS),
            column=step_word(head, kind),
            address=address(query),
            head=head,
        )

    def trials(self, query: Mapping[str, str]) -> Page:
        """A list of trials."""
        wanted = TrialFilter.read(query)
        lines, total = self._store.found(wanted)
        return "Trials", self._body(
            "trials.html",
            lines=lines,
            total=total,
            wanted=wanted,
            choices=self._store.choices(),
            pages=pages(total, PAGE),
            head=self._store.head(),
        )

    def group(self, query: Mapping[str, str], name: str) -> Page:
        """The trials of a group side by side."""
        lines = self._store.group(name)
        if not lines:
            raise MissingPageError(f"There is no group {name[:200]} in this run.")
        sheets = [sheet for line in lines if (sheet := self._store.sheet(line.trial)) is not None]
        return f"Group {name}", self._body("group.html", name=name, it=side_by_side(sheets), head=self._store.head())

    def trial(self, query: Mapping[str, str], name: str, turns: int = TURNS) -> Page:
        """One trial."""
        sheet = self._store.sheet(name)
        if sheet is None:
            raise MissingPageError(f"There is no trial {name[:200]} in this run.")
        colour, page = chosen(query, "colour", COLOURS), page_of(query)
        members = self._store.group(sheet.line.group) if sheet.line.group else []
        it = trial_view(sheet, members, page=page, colour=colour, turns=turns)
        return name, self._body(
            "trial.html", it=it, colour=colour, page=page, address=address(query), head=self._store.head()
        )

    def _body(self, template: str, **values: object) -> Markup:
        return body(template, self._links, **values)


def chosen(query: Mapping[str, str], name: str, values: tuple[str, ...] | list[str]) -> str:
    """One of some values, the first when nothing is said. Raises `AddressError` for another."""
    value = query.get(name) or values[0]
    if value not in values:
        raise AddressError(f"{name} {value[:40]!r} is unknown", do=f"one of {', '.join(values)}")
    return value


def page_of(query: Mapping[str, str]) -> int:
    """The page that is asked for, from 1."""
    return TrialFilter.read({"page": query.get("page", "")}).page


def pages(total: int, size: int) -> int:
    """How many pages so many lines make; one at least."""
    return max(1, -(-total // size))


def address(query: Mapping[str, str]) -> "AddressOf":
    """Makes the address of the same page with something else."""
    return AddressOf(dict(query))


class AddressOf:
    """The parameters of an address, to be changed one at a time."""

    def __init__(self, query: dict[str, str]) -> None:
        self._query = query

    def __call__(self, **change: object) -> str:
        """The parameters with this change, on the first page unless it says another."""
        new = {key: value for key, value in self._query.items() if key != "page"}
        new |= {key: str(value) for key, value in change.items()}
        return "?" + urlencode({key: value for key, value in new.items() if value not in ("", "1")})


def step_word(head: RunHead, kind: str) -> str:
    """What the columns of the heat map are."""
    return "attempt" if head.kind == "evaluation" else "step" if kind == "train" else "policy version"
