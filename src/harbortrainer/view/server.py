"""Local HTTP server for the pages of one run.

Contract: the server listens on 127.0.0.1 and answers only GET; no request changes anything. Each page is rendered on
request, from the current files. An invalid address gives a page with status 400 or 404, an unreadable run 500.
"""

import socket
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager

import uvicorn
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, Response
from starlette.routing import Route

from harbortrainer.errors import UserError
from harbortrainer.view.pages import (
    POLICY,
    Page,
    PageNotFoundError,
    RunPages,
    ServerLinks,
    asset,
    render_body,
    render_page,
)
from harbortrainer.view.queries import AddressError, IndexedRun

HEADERS = {
    "Content-Security-Policy": f"{POLICY}; style-src 'self'; script-src 'self'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}
HOSTS = ["localhost", "127.0.0.1"]
"""Accepted host names; others are refused, which stops DNS rebinding by another website."""

type MakePage = Callable[..., Page]


class Site:
    """Web application for one run. Requests are serialized because they share one index.

    Args:
        store: The indexed run.
        links: Links to its pages; by default they begin at the root.
        lock: Lock of a request; another application that uses the index has the same one.
    """

    def __init__(
        self, store: IndexedRun, links: ServerLinks | None = None, lock: AbstractContextManager[object] | None = None
    ) -> None:
        self._store, self._lock, self._links = store, lock or threading.Lock(), links or ServerLinks()
        self._pages = RunPages(store, self._links)

    def preload(self) -> None:
        """Render the overview once, so that the first request is fast."""
        self._pages.overview({})

    def app(self) -> Starlette:
        """Return the Starlette application."""
        pages = {
            "/": ("overview", self._pages.overview),
            "/tasks": ("tasks", self._pages.tasks),
            "/trials": ("trials", self._pages.trials),
            "/group/{name:path}": ("trials", self._pages.group),
            "/trial/{name:path}": ("trials", self._pages.trial),
        }
        routes = [Route(path, self._endpoint(here, make)) for path, (here, make) in pages.items()]
        routes += [*ASSETS, Route("/live", self._live)]
        guard = Middleware(TrustedHostMiddleware, allowed_hosts=HOSTS, www_redirect=False)
        return Starlette(routes=routes, middleware=[guard], exception_handlers={404: self._not_found})

    def _endpoint(self, here: str, make: MakePage) -> Callable[[Request], Response]:
        def answer(request: Request) -> Response:
            with self._lock:
                return self._respond(request, here, make)

        return answer

    def _respond(self, request: Request, here: str, make: MakePage) -> Response:
        try:
            stamp = self._store.refresh()
            title, inside = make(request.query_params, **request.path_params)
        except PageNotFoundError as error:
            return self._error_page(404, str(error))
        except UserError as error:
            return self._error_page(400 if isinstance(error, AddressError) else 500, str(error))
        except RecursionError:
            return self._error_page(500, "A value on this page is nested too deeply to be shown.")
        head = self._store.head()
        live = not request.url.path.startswith("/trial/")  # an ended trial does not change
        whole = render_page(title, inside, head, self._links, here=here, stamp=stamp, live=live)
        return HTMLResponse(whole, headers=HEADERS)

    def _error_page(self, status: int, message: str) -> Response:
        inside = render_body("problem.html", self._links, status=status, message=message)
        whole = render_page("Error", inside, self._store.head(), self._links)
        return HTMLResponse(whole, status, headers=HEADERS)

    def _not_found(self, request: Request, error: Exception) -> Response:
        return self._error_page(404, f"There is no page {request.url.path[:200]}.")

    def _live(self, request: Request) -> Response:
        """Return the progress and the stamp of the data; open pages poll it."""
        with self._lock:
            try:
                headers = HEADERS | {"X-Stamp": self._store.refresh()}
                return HTMLResponse(self._pages.progress(), headers=headers)
            except UserError as error:
                return PlainTextResponse(str(error), 500, headers=HEADERS)


def _asset_response(name: str, kind: str) -> Response:
    return Response(asset(name), media_type=kind, headers=HEADERS)


ASSETS = [
    Route("/style.css", lambda request: _asset_response("style.css", "text/css")),
    Route("/page.js", lambda request: _asset_response("page.js", "text/javascript")),
]
HOST = "127.0.0.1"


def listening_socket(port: int) -> socket.socket:
    """Return a socket that listens on 127.0.0.1; port 0 picks a free port.

    Raises:
        UserError: The port is in use or not permitted.
    """
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((HOST, port))
        listener.listen()
    except (OSError, OverflowError) as error:
        listener.close()
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise UserError(
            f"cannot listen on it ({reason})", where=f"port {port}", do="pass another port with --port"
        ) from None
    return listener


def serve_pages(app: Starlette, listening: socket.socket) -> None:
    """Serve until Ctrl-C. Call it from the main thread."""
    config = uvicorn.Config(app, log_level="warning", access_log=False, lifespan="off", timeout_graceful_shutdown=1)
    uvicorn.Server(config).run(sockets=[listening])
