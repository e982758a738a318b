"""The process of one environment server: config on stdin, address on stdout, end-of-file on stdin stops it.

It runs verifiers' `serve_env` with the arguments of Prime-RL's `env-server`. Its session gets a higher CPU priority
than the sandboxes' sessions.

Invariant: only the address is written to stdout, and torch is not imported for our plugin.
"""

import contextlib
import json
import logging
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Generator
from functools import partial
from pathlib import Path
from typing import TypedDict

from harbortrainer.config.plugin import PLUGIN_ID
from harbortrainer.runs.label import OWNER_VARIABLE, owner_of_process

_AUTOGROUP = Path("/proc/self/autogroup")
_NICE = -10
_WORKER_CHECK_S = 0.2


@contextlib.contextmanager
def raise_priority() -> Generator[None]:
    """Raise the CPU priority of this process's session within the context.

    With autogroups (sched(7)) the kernel gives each session one share of the CPU. Each command in a sandbox is a
    session of its own, so the server would get one share among dozens, although all of them wait for it.

    It needs root. Without root or without autogroups it does nothing.
    """
    try:
        *_, before = _AUTOGROUP.read_text().split()
        _AUTOGROUP.write_text(str(_NICE))
    except (OSError, ValueError):  # the file is missing, not writable, or empty (no autogroup)
        yield
        return
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            _AUTOGROUP.write_text(before)


GRACE = 15.0
"""Seconds for an orderly stop after the parent has ended; then the process exits, and its sandboxes with it."""


class AddressLine:
    """Writes the address of `serve_env` as a line to the original stdout."""

    def __init__(self) -> None:
        # Other output must not be mistaken for the address.
        self.fd = os.dup(1)
        os.dup2(2, 1)

    def put(self, address: str) -> None:
        """Write the address."""
        os.write(self.fd, f"{address}\n".encode())
        os.close(self.fd)


class ParentAlive:
    """A death pipe: `recv` returns when the parent closes our stdin or dies."""

    def recv(self) -> None:
        """Block until end-of-file; then exit after `GRACE` seconds at the latest."""
        os.read(0, 1)
        exit_after_grace()


def exit_after_grace() -> None:
    """End this process in `GRACE` seconds at the latest."""
    timer = threading.Timer(GRACE, os._exit, (1,))
    timer.daemon = True
    timer.start()


class WorkerWatch:
    """Stops the server in order when one of its workers ends; `keep_serving` starts it again.

    verifiers' pool does not notice a dead worker: it sends it further requests, and nobody answers them.
    """

    fault = ""
    """Which worker ended."""

    def start(self) -> None:
        """Watch in a thread."""
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        workers: set[multiprocessing.process.BaseProcess] = set()
        while not (lost := workers - (alive := set(multiprocessing.active_children()))):
            workers = alive
            time.sleep(_WORKER_CHECK_S)
        if signal.getsignal(signal.SIGTERM) is signal.SIG_IGN:  # the server stops, and ends its workers
            return
        self.fault = ", ".join(f"worker {worker.pid} ended with exit code {worker.exitcode}" for worker in lost)
        exit_after_grace()
        os.kill(os.getpid(), signal.SIGTERM)


def hide_torch() -> None:
    """Block the import of torch, which a tokenizer would import unused (500 MB in every worker)."""
    sys.modules["torch"] = None  # ty: ignore[invalid-assignment]


def set_up_worker(*, torch: bool) -> None:
    """Set up a process of the server: log to stderr, and block torch unless the source may need it."""
    if not torch:
        hide_torch()
    handler = logging.StreamHandler(sys.stderr)
    # Harbor logs at DEBUG: hundreds of lines per trial, which its trial.log also has.
    handler.setLevel(logging.INFO)
    logging.basicConfig(handlers=[handler], format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("verifiers.v1").setLevel(logging.INFO)
    logging.getLogger("harbortrainer").setLevel(logging.INFO)


class Request(TypedDict):
    """A source's `env` and `serve` tables, and the ZMQ address to bind."""

    env: dict[str, dict[str, object]]
    serve: dict[str, object]
    address: str


def serve(request: Request, announce: AddressLine) -> None:
    """Serve one environment until the parent ends.

    This process owns the sandboxes: those of a server that ended are ended, and not those of its successor.
    """
    os.environ[OWNER_VARIABLE] = owner_of_process(os.getpid())
    set_up = partial(set_up_worker, torch=request["env"].get("taskset", {}).get("id") != PLUGIN_ID)
    set_up()
    from harbortrainer.environment import verifiers_compat

    workers = WorkerWatch()
    with raise_priority():  # the session contains the server and its workers only
        verifiers_compat.serve(
            request["env"],
            request["serve"],
            address=request["address"],
            announce=announce,
            parent=ParentAlive(),
            set_up=set_up,
            watch_workers=workers.start,
        )
    if workers.fault:
        sys.exit(workers.fault)


def read_line() -> str:
    """Read one line from stdin without buffering: later bytes belong to the death pipe."""
    line = bytearray()
    while (byte := os.read(0, 1)) not in (b"\n", b""):
        line += byte
    return line.decode()


if __name__ == "__main__":
    serve(json.loads(read_line()), AddressLine())
