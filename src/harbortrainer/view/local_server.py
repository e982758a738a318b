"""The pages served on this machine alone, until Ctrl-C."""

import socket

import uvicorn
from starlette.applications import Starlette

from harbortrainer.errors import UserError

HOST = "127.0.0.1"


def bound_socket(port: int) -> socket.socket:
    """A socket that listens on this machine only; port 0 takes a free one.

    Raises:
        UserError: The port is in use, or may not be had.
    """
    own = socket.socket()
    own.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        own.bind((HOST, port))
        own.listen()
    except (OSError, OverflowError) as error:
        own.close()
        what = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise UserError(
            f"cannot be listened on ({what})", where=f"port {port}", do="take another one with --port"
        ) from None
    return own


def serve_pages(app: Starlette, listening: socket.socket) -> None:
    """Answer until Ctrl-C; from the main thread."""
    config = uvicorn.Config(app, log_level="warning", access_log=False, lifespan="off", timeout_graceful_shutdown=1)
    uvicorn.Server(config).run(sockets=[listening])
