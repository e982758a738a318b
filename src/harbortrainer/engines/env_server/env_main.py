"""The process of one environment server: config on stdin, address on stdout, end-of-file on stdin means stop.

It runs verifiers' `serve_env` with the arguments Prime-RL's `env-server` gives it. Invariant: nothing but the address
is written to stdout, and torch is not imported for our own plugin.
"""

import json
import logging
import os
import sys
import threading
from functools import partial
from typing import TypedDict

from harbortrainer.config.plugin import PLUGIN_ID
from harbortrainer.sandbox.precedence import before_sandboxes

GRACE = 15.0
"""Seconds for an orderly end once the parent is gone; what hangs longer is ended, and its sandboxes with it."""


class AddressLine:
    """Where `serve_env` reports its address: a line on the stdout that the process was started with."""

    def __init__(self) -> None:
        # Whatever else prints must not be taken for the address.
        self.fd = os.dup(1)
        os.dup2(2, 1)

    def put(self, address: str) -> None:
        """Report the address."""
        os.write(self.fd, f"{address}\n".encode())
        os.close(self.fd)


class ParentAlive:
    """A death pipe: `recv` returns when the parent closes our stdin, or dies."""

    def recv(self) -> None:
        """Block until end-of-file; from then on the process has `GRACE` seconds to end in order."""
        os.read(0, 1)
        last_word = threading.Timer(GRACE, os._exit, (1,))
        last_word.daemon = True
        last_word.start()


def hide_torch() -> None:
    """Make torch look as if it were not installed: a tokenizer would import it, 500 MB in every worker, unused."""
    sys.modules["torch"] = None  # ty: ignore[invalid-assignment]


def set_up_worker(*, torch: bool) -> None:
    """What every process of the server starts with: its log on stderr, and torch only if the source may need it."""
    if not torch:
        hide_torch()
    handler = logging.StreamHandler(sys.stderr)
    # Harbor opens its loggers down to DEBUG: hundreds of lines a trial, which its own trial.log has too.
    handler.setLevel(logging.INFO)
    logging.basicConfig(handlers=[handler], format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("verifiers.v1").setLevel(logging.INFO)
    logging.getLogger("harbortrainer").setLevel(logging.INFO)


class Request(TypedDict):
    """A source's `env` and `serve` tables."""

    env: dict[str, dict[str, object]]
    serve: dict[str, object]


def serve(request: Request, address: AddressLine) -> None:
    """Serve one environment until the parent is gone."""
    set_up = partial(set_up_worker, torch=request["env"].get("taskset", {}).get("id") != PLUGIN_ID)
    set_up()
    from harbortrainer.environment import verifiers_side

    with before_sandboxes():  # this session is the server's own, with its workers
        verifiers_side.serve(request["env"], request["serve"], address=address, parent=ParentAlive(), set_up=set_up)


def read_line(fd: int = 0) -> str:
    """One line from `fd`, and not a byte more: what comes after it is the death pipe's."""
    line = bytearray()
    while (byte := os.read(fd, 1)) not in (b"\n", b""):
        line += byte
    return line.decode()


if __name__ == "__main__":
    serve(json.loads(read_line()), AddressLine())
