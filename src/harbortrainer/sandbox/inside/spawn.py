"""Starts commands in the sandbox, as children of its first process."""

import contextlib
import os
import signal
import subprocess
from collections.abc import Generator

from harbortrainer.sandbox.inside import file_calls
from harbortrainer.sandbox.inside.messages import Command

ROOT = (None, "", 0, "0", "root")
NOT_FOUND, NOT_EXECUTABLE = 127, 126
AGENTS_ORDER, VERIFIERS_ORDER = 800, 500
"""The order in which the kernel ends processes when memory runs out: the highest first."""
_OWN_ORDER = 200  # nothing in the sandbox can go below it
_order_fd = -1


def prepare() -> None:
    """Be the last whom the kernel ends. Before this process is hidden: later the file cannot be opened any more."""
    global _order_fd
    _order_fd = os.open("/proc/self/oom_score_adj", os.O_WRONLY | os.O_CLOEXEC)
    _set_order(_OWN_ORDER)


def _set_order(order: int) -> None:
    os.pwrite(_order_fd, str(order).encode(), 0)


@contextlib.contextmanager
def _ordered(order: int) -> Generator[None]:
    """What is started meanwhile inherits the order."""
    _set_order(order)
    try:
        yield
    finally:
        _set_order(_OWN_ORDER)


def wake_on_children() -> int:
    """A descriptor that can be read whenever a child has ended."""
    read, write = os.pipe()
    for fd in (read, write):
        os.set_blocking(fd, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # what is ignored stays ignored in commands
    signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    return read


def find_user(user: str | int | None) -> tuple[int, int, list[int], str]:
    """(uid, gid, further groups, home folder) of a user of the sandbox; LookupError for a name it does not have."""
    wanted = "0" if user in (None, "") else str(user)
    name, uid, gid, home = wanted, int(wanted) if wanted.isdigit() else None, None, "/"
    for fields in _table("/etc/passwd", 7):
        if fields[0] == wanted or fields[2] == wanted:
            name, uid, gid, home = fields[0], int(fields[2]), int(fields[3]), fields[5]
            break
    if uid is None:
        raise LookupError(f"no user {wanted!r} in the sandbox's /etc/passwd")
    group = uid if gid is None else gid
    further = [int(f[2]) for f in _table("/etc/group", 4) if name in f[3].split(",")]
    return uid, group, further, home or "/"


def _table(path: str, width: int) -> list[list[str]]:
    try:
        with open(path, errors="replace") as file:
            rows = [line.rstrip("\n").split(":") for line in file]
    except OSError:
        return []
    return [row for row in rows if len(row) >= width and row[2].isdigit() and (width < 7 or row[3].isdigit())]


def spawn(command: Command, fds: list[int], order: int) -> int:
    """Start a command of root's. Without a copy of this process, which would be most of the cost."""
    with _ordered(order):
        process = subprocess.Popen(
            command.argv,
            stdin=fds[0],
            stdout=fds[1],
            stderr=fds[2],
            cwd=command.cwd,
            env={"HOME": "/root", **command.env},
            start_new_session=True,
        )
    process.returncode = 0  # it is reaped by us
    return process.pid


def fork(command: Command, fds: list[int], order: int) -> int:
    """Start any command, or carry out a call."""
    with _ordered(order):
        pid = os.fork()
        if pid == 0:
            _become(command, fds)
    return pid


def _become(command: Command, fds: list[int]) -> None:
    """In the forked child: turn into the command. Never returns."""
    code = NOT_EXECUTABLE
    try:
        os.setsid()
        for number, fd in enumerate(fds):
            os.dup2(fd, number)
        os.closerange(3, 4096)
        # Only here, never in the first process: the file is the agent's, and may be a pipe that blocks.
        uid, gid, further, home = find_user(command.user)
        if (uid, gid) != (0, 0):
            _change_user(uid, gid, further)
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGCHLD, signal.SIGPIPE, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)
        name, *arguments = command.argv
        if command.call:
            code = file_calls.CALLS[name]([0, 1, 2], *arguments)
        else:
            os.chdir(command.cwd)
            os.execvpe(name, command.argv, {"HOME": home, **command.env})
    except Exception as error:  # noqa: BLE001 - the process's last frame: whoever asked for it is told
        code = NOT_FOUND if isinstance(error, FileNotFoundError) else NOT_EXECUTABLE
        os.write(2, f"sandbox: {error}\n".encode())
    finally:
        os._exit(code)


def _change_user(uid: int, gid: int, further: list[int]) -> None:
    try:
        os.setgroups([*further, gid])
        os.setresgid(gid, gid, gid)
        os.setresuid(uid, uid, uid)
    except OSError as error:
        raise LookupError(f"cannot become user {uid}: a sandbox of an ordinary user has root only ({error})") from error
