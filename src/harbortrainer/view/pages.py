"""Rendering of the pages: a title and HTML for each address of the server, or all pages in one exported file.

Invariant: every value in a template is escaped, and its invisible characters are replaced. Only our own SVG and token
markup is inserted unescaped.
"""

import base64
import hashlib
import time
from collections.abc import Collection, Mapping, Sequence
from functools import cache
from importlib.resources import files
from urllib.parse import quote, urlencode

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from harbortrainer.view import format
from harbortrainer.view.charts import short_number
from harbortrainer.view.format import escape_invisible
from harbortrainer.view.heat_map import ORDERS, ROWS, heat_map
from harbortrainer.view.outcome_styles import outcome_style
from harbortrainer.view.overview import overview_of
from harbortrainer.view.progress import progress_of_run
from harbortrainer.view.queries import KINDS, PAGE, AddressError, IndexedRun, TrialFilter
from harbortrainer.view.side_by_side import side_by_side
from harbortrainer.view.trial_page import COLOURS, TURNS, trial_page_of
from harbortrainer.view.trial_view import RunHead


class ServerLinks:
    """Links to the addresses of the local server.

    Args:
        prefix: Address of the run; empty for a server of one run.
    """

    live = True
    """Whether a server answers, so that filters, pagers and reloading work."""

    def __init__(self, prefix: str = "") -> None:
        self._prefix = prefix

    @property
    def runs(self) -> str:
        """Link to the list of runs; empty for a server of one run."""
        return "/" if self._prefix else ""

    def overview(self) -> str:
        """Return the link to the overview."""
        return f"{self._prefix}/"

    def live_path(self) -> str:
        """Return the address that an open page polls."""
        return f"{self._prefix}/live"

    def tasks(self, query: str = "") -> str:
        """Return the link to the heat map."""
        return f"{self._prefix}/tasks" + (f"?{query}" if query else "")

    def trials(self, query: str = "") -> str:
        """Return the link to a list of trials."""
        return f"{self._prefix}/trials" + (f"?{query}" if query else "")

    def trial(self, name: str) -> str:
        """Return the link to a trial."""
        return f"{self._prefix}/trial/{quote(name, safe='')}"

    def group(self, name: str) -> str:
        """Return the link to a group."""
        return f"{self._prefix}/group/{quote(name, safe='')}"


class FileLinks(ServerLinks):
    """Links to anchors within one file; empty for content that is not in the file.

    Args:
        trials: Names of the trials in the file.
        groups: Ids of the groups in the file.
    """

    live = False

    def __init__(self, trials: Collection[str], groups: Collection[str]) -> None:
        super().__init__()
        self._trials = {name: f"#trial-{index}" for index, name in enumerate(trials, 1)}
        self._groups = {name: f"#group-{index}" for index, name in enumerate(groups, 1)}

    def overview(self) -> str:
        """Return the link to the overview."""
        return "#overview"

    def tasks(self, query: str = "") -> str:
        """Return the link to the heat map; empty for a filtered one."""
        return "" if query else "#tasks"

    def trials(self, query: str = "") -> str:
        """Return the link to the list of trials; empty for a filtered one."""
        return "" if query else "#trials"

    def trial(self, name: str) -> str:
        """Return the link to a trial; empty if the file does not have it."""
        return self._trials.get(name, "")

    def group(self, name: str) -> str:
        """Return the link to a group; empty if the file does not have it."""
        return self._groups.get(name, "")


POLICY = "default-src 'none'; img-src 'self' data:; connect-src 'self'; form-action 'self'; base-uri 'none'"
"""Content-Security-Policy that loads nothing from other hosts; callers append style-src and script-src."""


@cache
def _templates() -> Environment:
    templates = Environment(
        loader=PackageLoader("harbortrainer.view"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_printable,
    )
    templates.filters |= {
        "reward": format.reward,
        "duration": format.duration,
        "count": format.count,
        "plural": format.plural,
        "short_number": short_number,
        "relative_path": format.relative_path,
        "outcome_style": outcome_style,
    }
    return templates


def _printable(value: object) -> object:
    """Replace invisible characters of a template value that is plain text."""
    return escape_invisible(value) if isinstance(value, str) and not isinstance(value, Markup) else value


@cache
def asset(name: str) -> str:
    """Read a file of `static/`."""
    return (files("harbortrainer.view") / "static" / name).read_text(encoding="utf-8")


def render_body(template: str, links: ServerLinks, **values: object) -> Markup:
    """Render the content of a page."""
    return Markup(_templates().get_template(template).render(links=links, **values))


def render_page(
    title: str,
    inside: Markup,
    head: RunHead,
    links: ServerLinks,
    *,
    here: str = "",
    stamp: str = "",
    live: bool = False,
) -> str:
    """Render a whole page of the server; a `live` one updates itself when the stamp of the data changes."""
    values = {"title": title, "inside": inside, "head": head, "here": here, "stamp": stamp, "live": live}
    return _templates().get_template("page.html").render(values, links=links)


def render_file(title: str, sections: Sequence[tuple[str, Markup]], head: RunHead, links: FileLinks) -> str:
    """Render a self-contained file; `sections` are pairs of anchor and content."""
    style, script = asset("style.css"), asset("page.js")
    policy = f"{POLICY}; style-src '{_hash(style)}'; script-src '{_hash(script)}'"
    values: Mapping[str, object] = {
        "title": title,
        "sections": sections,
        "head": head,
        "links": links,
        "style": Markup(style),
        "script": Markup(script),
        "policy": policy,
    }
    return _templates().get_template("file.html").render(values)


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


type Page = tuple[str, Markup]


class PageNotFoundError(Exception):
    """An address of an unknown trial or group."""


class RunPages:
    """The pages of one run.

    Args:
        store: The indexed run.
        links: Factory for the links.
    """

    def __init__(self, store: IndexedRun, links: ServerLinks) -> None:
        self._store, self._links = store, links

    def overview(self, query: Mapping[str, str]) -> Page:
        """Return the overview page."""
        head = self._store.head()
        values = {"it": overview_of(self._store), "head": head, "progress": progress_of_run(self._store, time.time())}
        return head.name, self._body("overview.html", **values)

    def progress(self) -> Markup:
        """Return the part of the overview that changes every second."""
        return self._body("_progress.html", progress=progress_of_run(self._store, time.time()))

    def tasks(self, query: Mapping[str, str]) -> Page:
        """Return the heat map of tasks."""
        kinds = [kind for kind in KINDS if self._store.cells(kind)] or ["train"]
        kind = choice(query, "kind", [*kinds, *(kind for kind in KINDS if kind not in kinds)])
        order, page, search = choice(query, "sort", ORDERS), page_number(query), query.get("search", "")
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
            pages=page_count(found.tasks, ROWS),
            column=step_label(head, kind),
            address=address(query),
            head=head,
        )

    def trials(self, query: Mapping[str, str]) -> Page:
        """Return a list of trials."""
        wanted = TrialFilter.read(query)
        lines, total = self._store.find(wanted)
        return "Trials", self._body(
            "trials.html",
            lines=lines,
            total=total,
            wanted=wanted,
            choices=self._store.choices(),
            pages=page_count(total, PAGE),
            head=self._store.head(),
        )

    def group(self, query: Mapping[str, str], name: str) -> Page:
        """Return the comparison of a group's trials."""
        lines = self._store.group(name)
        if not lines:
            raise PageNotFoundError(f"This run has no group {name[:200]}.")
        trials = [detail for line in lines if (detail := self._store.detail(line.trial)) is not None]
        return f"Group {name}", self._body("group.html", name=name, it=side_by_side(trials), head=self._store.head())

    def trial(self, query: Mapping[str, str], name: str, turns: int = TURNS) -> Page:
        """Return the page of a trial."""
        detail = self._store.detail(name)
        if detail is None:
            raise PageNotFoundError(f"This run has no trial {name[:200]}.")
        colour, page = choice(query, "colour", COLOURS), page_number(query)
        members = self._store.group(detail.row.group) if detail.row.group else []
        it = trial_page_of(detail, members, page=page, colour=colour, turns=turns)
        values = {"it": it, "colour": colour, "page": page, "raw": choice(query, "raw", ("", "yes")) == "yes"}
        return name, self._body("trial.html", **values, address=address(query), head=self._store.head())

    def _body(self, template: str, **values: object) -> Markup:
        return render_body(template, self._links, **values)


def choice(query: Mapping[str, str], name: str, values: tuple[str, ...] | list[str]) -> str:
    """Return the parameter's value, or the first of `values` by default. Raises `AddressError` for an unknown value."""
    value = query.get(name) or values[0]
    if value not in values:
        raise AddressError(f"{name} {value[:40]!r} is unknown", do=f"use one of {', '.join(values)}")
    return value


def page_number(query: Mapping[str, str]) -> int:
    """Return the requested page number, from 1."""
    return TrialFilter.read({"page": query.get("page", "")}).page


def page_count(total: int, size: int) -> int:
    """Return the number of pages for `total` rows; at least one."""
    return max(1, -(-total // size))


def address(query: Mapping[str, str]) -> "AddressBuilder":
    """Return a builder of variants of the current address."""
    return AddressBuilder(dict(query))


class AddressBuilder:
    """Builder of variants of a page's address."""

    def __init__(self, query: dict[str, str]) -> None:
        self._query = query

    def __call__(self, **change: object) -> str:
        """Return the address parameters with `change` applied; page 1 unless `change` sets it."""
        new = {key: value for key, value in self._query.items() if key != "page"}
        new |= {key: str(value) for key, value in change.items()}
        return "?" + urlencode({key: value for key, value in new.items() if value not in ("", "1")})


def step_label(head: RunHead, kind: str) -> str:
    """Return what the columns of the heat map stand for."""
    return "attempt" if head.kind == "evaluation" else "step" if kind == "train" else "policy version"
