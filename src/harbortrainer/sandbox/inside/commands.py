"""Starts commands in the sandbox, as children of its first process.

A request has "argv", "call" (argv is a function of `files` and its arguments), "cwd", "env" and "user".
"""

import os
import signal
import subprocess
from typing import Any

from harbortrainer.sandbox.inside import files

ROOT = (None, "", 0, "0", "root")
NOT_FOUND, NOT_EXECUTABLE = 127, 126


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


def spawn(request: dict[str, Any], fds: list[int]) -> int:
    """Start a command of root's. Without a copy of this process, which would be most of the cost."""
    process = subprocess.Popen(
        request["argv"],
        stdin=fds[0],
        stdout=fds[1],
        stderr=fds[2],
        cwd=request["cwd"],
        env={"HOME": "/root", **request["env"]},
        start_new_session=True,
    )
    process.returncode = 0  # it is reaped by us
    return process.pid


def fork(request: dict[str, Any], fds: list[int]) -> int:
    pid = os.fork()
    if pid == 0:
        _become(request, fds)
    return pid


def _become(request: dict[str, Any], fds: list[int]) -> None:
    """In the forked child: turn into the command. Never returns."""
    code = NOT_EXECUTABLE
    try:
        os.setsid()
        for number, fd in enumerate(fds):
            os.dup2(fd, number)
        os.closerange(3, 4096)
        # Only here, never in the first process: the file is the agent's, and may be a pipe that blocks.
        uid, gid, further, home = find_user(request.get("user"))
        if (uid, gid) != (0, 0):
            _change_user(uid, gid, further)
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGCHLD, signal.SIGPIPE, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)
        name, *arguments = request["argv"]
        if request["call"]:
            code = files.CALLS[name]([0, 1, 2], *arguments)
        else:
            os.chdir(request["cwd"])
            os.execvpe(name, request["argv"], {"HOME": home, **request["env"]})
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
