"""Inventory of local sandboxes: the `inventory` of the environment type `local`.

A local sandbox ends with the process that started it. One is left only if that process outlived its run, for example
the worker of a killed environment server.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil

from harbortrainer.runs.label import NO_RUN, OWNER_VARIABLE, RUN_VARIABLE, owner_of_process
from harbortrainer.sandbox.inside.messages import SANDBOX_TITLE
from harbortrainer.sandbox.inventory import InventoryError

GRACE_S = 10.0
"""Seconds that a process has to end after a signal, and its sandboxes after it."""


def find(run: str) -> list[dict[str, str]]:
    """Return the sandboxes of a run. An empty `run` means all processes whose environment this user can read."""
    found = []
    for monitor, starter, task in _monitors():
        try:
            variables, since = starter.environ(), str(int(monitor.create_time()))
            owner = variables.get(OWNER_VARIABLE) or owner_of_process(starter.pid)
        except psutil.Error:
            continue
        label = variables.get(RUN_VARIABLE, NO_RUN)
        if run in ("", label):
            found.append({"id": str(monitor.pid), "run": label, "owner": owner, "task": task, "since": since})
    return found


def end(ids: Sequence[str]) -> None:
    """End the processes that started these sandboxes, and wait for the sandboxes' end. Raises `InventoryError`."""
    found = [(monitor, starter) for monitor, starter, _ in _monitors() if str(monitor.pid) in ids]
    starters = list({starter for _, starter in found})
    for send in (psutil.Process.terminate, psutil.Process.kill):
        for starter in starters:
            try:
                send(starter)
            except psutil.NoSuchProcess:
                continue
            except psutil.Error as error:
                raise InventoryError(str(error)) from error
        _, starters = psutil.wait_procs(starters, timeout=GRACE_S)
    _, alive = psutil.wait_procs([monitor for monitor, _ in found], timeout=GRACE_S)
    if alive:
        raise InventoryError(f"still running: processes {', '.join(str(one.pid) for one in alive)}")


def _monitors() -> Iterator[tuple[psutil.Process, psutil.Process, str]]:
    """Yield the monitor of each sandbox, the process that started the sandbox, and the task's name."""
    for process in psutil.process_iter():
        try:
            title, _, rest = "".join(process.cmdline()).partition(" ")
            owner, _, task = rest.partition(" ")
            if title == SANDBOX_TITLE and owner.isdigit() and _is_outside_sandboxes(process.pid):
                yield process, psutil.Process(int(owner)), task
        except psutil.Error:
            continue


def _is_outside_sandboxes(pid: int) -> bool:
    """Whether a process is in this process's namespace of processes; a command in a sandbox can take any title."""
    try:
        return Path(f"/proc/{pid}/ns/pid").readlink() == Path("/proc/self/ns/pid").readlink()
    except OSError:
        return False
