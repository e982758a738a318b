"""The pages of one run, by address. Only GET; nothing that is asked for changes anything.

Contract: every page is made when it is asked for, from what was written up to then. An address that means nothing is a
page with one line, 400 or 404; a run that can no longer be read is one with 500.
"""

import threading
from collections.abc import Callable

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, Response
from starlette.routing import Route

from harbortrainer.errors import UserError
from harbortrainer.view.page_links import ServerLinks
from harbortrainer.view.page_writer import POLICY, asset, body, page
from harbortrainer.view.run_pages import MissingPageError, Page, RunPages
from harbortrainer.view.trial_filter import AddressError
from harbortrainer.view.trial_store import TrialStore

HEADERS = {
    "Content-Security-Policy": f"{POLICY}; style-src 'self'; script-src 'self'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}
HOSTS = ["localhost", "127.0.0.1"]
"""The names by which a browser here asks; another one is a page elsewhere that would like to read along."""

type MakePage = Callable[..., Page]


class Site:
    """One run as pages. Requests wait for each other: the store is one."""

    def __init__(self, store: TrialStore) -> None:
        self._store, self._lock, self._links = store, threading.Lock(), ServerLinks()
        self._pages = RunPages(store, self._links)

    def get_ready(self) -> None:
        """Make the first page once: what it needs is loaded and counted before somebody waits for it."""
        self._pages.overview({})

    def app(self) -> Starlette:
        """The application."""
        shown = {
            "/": ("overview", self._pages.overview),
            "/tasks": ("tasks", self._pages.tasks),
            "/trials": ("trials", self._pages.trials),
            "/group/{name:path}": ("trials", self._pages.group),
            "/trial/{name:path}": ("trials", self._pages.trial),
        }
        routes = [Route(path, self._answering(here, make)) for path, (here, make) in shown.items()]
        routes += [
            Route("/style.css", lambda request: _file("style.css", "text/css")),
            Route("/page.js", lambda request: _file("page.js", "text/javascript")),
            Route("/stamp", self._stamp),
        ]
        guard = Middleware(TrustedHostMiddleware, allowed_hosts=HOSTS, www_redirect=False)
        return Starlette(routes=routes, middleware=[guard], exception_handlers={404: self._nowhere})

    def _answering(self, here: str, make: MakePage) -> Callable[[Request], Response]:
        def answer(request: Request) -> Response:
            with self._lock:
                return self._answer(request, here, make)

        return answer

    def _answer(self, request: Request, here: str, make: MakePage) -> Response:
        try:
            stamp = self._store.refresh()
            title, inside = make(request.query_params, **request.path_params)
        except MissingPageError as error:
            return self._problem(404, str(error))
        except UserError as error:
            return self._problem(400 if isinstance(error, AddressError) else 500, str(error))
        head = self._store.head()
        return HTMLResponse(page(title, inside, head, self._links, here=here, stamp=stamp), headers=HEADERS)

    def _problem(self, status: int, message: str) -> Response:
        inside = body("problem.html", self._links, status=status, message=message)
        whole = page("Nothing to show", inside, self._store.head(), self._links)
        return HTMLResponse(whole, status, headers=HEADERS)

    def _nowhere(self, request: Request, error: Exception) -> Response:
        return self._problem(404, f"There is no page {request.url.path[:200]}.")

    def _stamp(self, request: Request) -> Response:
        """Changes when the run wrote something: the open page asks for it."""
        with self._lock:
            try:
                return PlainTextResponse(self._store.refresh(), headers=HEADERS)
            except UserError as error:
                return PlainTextResponse(str(error), 500, headers=HEADERS)


def _file(name: str, kind: str) -> Response:
    return Response(asset(name), media_type=kind, headers=HEADERS)
