"""Web application for the runs in a folder: the list, the comparison, and the pages of each run below `/run/NAME`.

Contract: as of `view/server.py`. Only runs that `find_runs` returns are served, so no address leads out of the folder.
"""

import threading
from collections.abc import Callable
from urllib.parse import quote

from markupsafe import Markup
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Mount, Route
from starlette.types import ASGIApp, Receive, Scope, Send

from harbortrainer.errors import UserError
from harbortrainer.view.pages import Page, ServerLinks, render_body, render_page
from harbortrainer.view.queries import AddressError
from harbortrainer.view.run_list import MAX_COMPARED, RunSet, compare
from harbortrainer.view.server import ASSETS, HEADERS, HOSTS, Site
from harbortrainer.view.trial_view import RunHead


class RunListLinks(ServerLinks):
    """Links of the list itself."""

    runs = "/"


def run_link(name: str) -> str:
    """Return the address of a run."""
    return f"/run/{quote(name)}/"


class RunListSite:
    """Web application for the runs in a folder. Requests are serialized, because runs share their indexes.

    Args:
        runs: The runs.
    """

    def __init__(self, runs: RunSet) -> None:
        self._runs, self._lock, self._links = runs, threading.Lock(), RunListLinks()
        self._sites: dict[str, ASGIApp] = {}

    def preload(self) -> None:
        """Render the list once, so that the first request is fast."""
        self._list()

    def app(self) -> Starlette:
        """Return the Starlette application."""
        routes = [
            Route("/", self._endpoint(lambda request: self._list())),
            Route("/compare", self._endpoint(self._compare)),
            Route("/live", self._live),
            *ASSETS,
            Mount("/run", self._run),
        ]
        guard = Middleware(TrustedHostMiddleware, allowed_hosts=HOSTS, www_redirect=False)
        return Starlette(routes=routes, middleware=[guard], exception_handlers={404: self._not_found})

    def _endpoint(self, make: Callable[[Request], Page]) -> Callable[[Request], Response]:
        def answer(request: Request) -> Response:
            with self._lock:
                try:
                    stamp = self._runs.refresh()
                    title, inside = make(request)
                except UserError as error:
                    return self._error_page(400 if isinstance(error, AddressError) else 500, str(error))
                whole = render_page(title, inside, self._head(), self._links, here="runs", stamp=stamp, live=True)
                return HTMLResponse(whole, headers=HEADERS)

        return answer

    def _head(self) -> RunHead:
        return RunHead(self._runs.folder.name, "runs", str(self._runs.folder), "", "")

    def _list(self) -> Page:
        found = [self._runs.summary(name) for name in self._runs.names()]
        evaluations = [one for one in found if one.head is not None and one.head.kind == "evaluation"]
        inside = render_body(
            "runs.html",
            self._links,
            runs=[one for one in found if one not in evaluations],
            evaluations=evaluations,
            folder=str(self._runs.folder),
            run_link=run_link,
            most=MAX_COMPARED,
        )
        return "Runs", inside

    def _compare(self, request: Request) -> Page:
        names, known = list(dict.fromkeys(request.query_params.getlist("run"))), self._runs.names()
        if unknown := [name for name in names if name not in known]:
            raise AddressError(f"there is no run {unknown[0][:100]!r}", do="select runs in the list")
        if not 2 <= len(names) <= MAX_COMPARED:
            raise AddressError(f"{len(names)} runs are selected", do=f"select two to {MAX_COMPARED} in the list")
        inside = render_body("compare.html", self._links, it=compare(self._runs, names), run_link=run_link)
        return "Comparison", inside

    def _live(self, request: Request) -> Response:
        """Return the stamp of the data; open pages poll it."""
        with self._lock:
            stamp = self._runs.refresh()
        return HTMLResponse(Markup('<div id="progress"></div>'), headers=HEADERS | {"X-Stamp": stamp})

    async def _run(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on to the pages of its run."""
        path = scope["path"].removeprefix("/run/")
        name = next((name for name in self._runs.names() if path.startswith(f"{name}/")), None)
        if name is None:
            await self._not_found(Request(scope), KeyError())(scope, receive, send)
            return
        if name not in self._sites:
            try:
                site = Site(self._runs.run(name), ServerLinks(f"/run/{quote(name)}"), self._lock)
            except UserError as error:
                await self._error_page(500, str(error))(scope, receive, send)
                return
            self._sites[name] = site.app()
        inner = path[len(name) :]
        await self._sites[name](
            {**scope, "path": inner, "raw_path": quote(inner).encode(), "root_path": ""}, receive, send
        )

    def _not_found(self, request: Request, error: Exception) -> Response:
        return self._error_page(404, f"There is no page {request.url.path[:200]}.")

    def _error_page(self, status: int, message: str) -> Response:
        inside = render_body("problem.html", self._links, status=status, message=message)
        return HTMLResponse(render_page("Error", inside, self._head(), self._links), status, headers=HEADERS)
