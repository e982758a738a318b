"""Command execution in the sandbox: commands run as children of an init process, which reports when they end.

Single-threaded: the owner calls `execute` for each `Command` and `reap` whenever a child has ended.
"""

import contextlib
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Generator
from functools import partial

from harbortrainer.sandbox.inside import file_calls
from harbortrainer.sandbox.inside import messages as m
from harbortrainer.sandbox.inside.messages import Command
from harbortrainer.sandbox.inside.regular_files import read_regular

ROOT_USERS = (None, "", 0, "0", "root")
AGENT_OOM_SCORE, VERIFIER_OOM_SCORE = 800, 500
"""Values of oom_score_adj: when memory runs out, the kernel kills the highest first."""
_INIT_OOM_SCORE = 200  # no process in the sandbox can lower its own below this
_MAX_TABLE_B = 1 << 20
_IGNORED_BY_PYTHON = signal.SIGPIPE, signal.SIGXFSZ  # in this process; `subprocess` restores them in a child
_oom_score_fd = -1


def protect_from_oom() -> None:
    """Make this process the last one that the kernel kills when memory runs out.

    Call it before `syscalls.hide_memory`: afterwards /proc/self/oom_score_adj cannot be opened.
    """
    global _oom_score_fd
    _oom_score_fd = os.open("/proc/self/oom_score_adj", os.O_WRONLY | os.O_CLOEXEC)
    _set_oom_score(_INIT_OOM_SCORE)


def _set_oom_score(oom_score: int) -> None:
    os.pwrite(_oom_score_fd, str(oom_score).encode(), 0)


@contextlib.contextmanager
def _child_oom_score(oom_score: int) -> Generator[None]:
    """Give children that are started in this block the score."""
    _set_oom_score(oom_score)
    try:
        yield
    finally:
        _set_oom_score(_INIT_OOM_SCORE)


def open_child_wakeup() -> int:
    """Return a descriptor that becomes readable whenever a child has ended."""
    read, write = os.pipe()
    for fd in (read, write):
        os.set_blocking(fd, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    for number in signal.valid_signals():  # commands would inherit what is ignored, as by nohup
        if signal.getsignal(number) is signal.SIG_IGN and number not in _IGNORED_BY_PYTHON:
            signal.signal(number, signal.SIG_DFL)
    signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    return read


def find_user(user: str | int | None) -> tuple[int, int, list[int], str]:
    """Return (uid, gid, supplementary groups, home folder) of a user of the sandbox, as Docker does.

    Args:
        user: A name or id; `user:group` with a group instead of the user's own. An id without an entry has group 0.

    Raises:
        LookupError: The sandbox's /etc/passwd or /etc/group does not have the name.
    """
    wanted, _, wanted_group = str("" if user is None else user).partition(":")
    wanted = wanted or "0"
    found = next((f for f in _read_table("/etc/passwd", 7) if wanted in (f[0], f[2])), None)
    if found is None and not wanted.isdecimal():
        raise LookupError(f"no user {wanted!r} in the sandbox's /etc/passwd")
    name, uid, gid, home = (found[0], found[2], found[3], found[5]) if found else (None, wanted, 0, "/")
    rows = _read_table("/etc/group", 4)
    if wanted_group:
        return int(uid), _find_group(wanted_group, rows), [], home or "/"
    return int(uid), int(gid), [int(f[2]) for f in rows if name in f[3].split(",")], home or "/"


def _find_group(wanted: str, rows: list[list[str]]) -> int:
    found = next((f[2] for f in rows if wanted in (f[0], f[2])), wanted)
    if not found.isdecimal():
        raise LookupError(f"no group {wanted!r} in the sandbox's /etc/group")
    return int(found)


def _read_table(path: str, width: int) -> list[list[str]]:
    try:
        text = read_regular(path, _MAX_TABLE_B, follow=True).decode(errors="replace")
    except OSError:
        return []
    rows = [line.split(":") for line in text.split("\n")]
    return [row for row in rows if len(row) >= width and row[2].isdecimal() and (width < 7 or row[3].isdecimal())]


def spawn(command: Command, fds: list[int], oom_score: int, home: str = "/root") -> int:
    """Start a command as root with vfork, which avoids the cost of copying this process.

    Args:
        home: Root's home folder.
    """
    with _child_oom_score(oom_score):
        process = subprocess.Popen(
            command.argv,
            stdin=fds[0],
            stdout=fds[1],
            stderr=fds[2],
            cwd=command.cwd,
            env={"HOME": home, **command.env},
            start_new_session=True,
        )
    process.returncode = 0  # `CommandRunner.reap` reaps it, not subprocess
    return process.pid


def fork(command: Command, fds: list[int], oom_score: int) -> int:
    """Start any command or call in a forked child."""
    with _child_oom_score(oom_score):
        pid = os.fork()
        if pid == 0:
            _exec_child(command, fds)
    return pid


def _exec_child(command: Command, fds: list[int]) -> None:
    """Execute the command or call. Runs in the forked child and never returns."""
    code = m.NOT_EXECUTABLE
    try:
        os.setsid()
        for number, fd in enumerate(fds):
            os.dup2(fd, number)
        os.closerange(3, 4096)
        uid, gid, groups, home = find_user(command.user)
        if command.groups:
            gid, *groups = command.groups
        if (uid, gid) != (0, 0):
            _change_user(uid, gid, groups)
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGCHLD, *_IGNORED_BY_PYTHON):
            signal.signal(number, signal.SIG_DFL)
        name, *arguments = command.argv
        if command.call:
            code = file_calls.CALLS[name]([0, 1, 2], *arguments)
        else:
            os.chdir(command.cwd)
            os.execvpe(name, command.argv, {"HOME": home, **command.env})
    except Exception as error:  # noqa: BLE001 - the process's last frame: the error goes to the caller's stderr
        code = m.NOT_FOUND if isinstance(error, FileNotFoundError) else m.NOT_EXECUTABLE
        os.write(2, m.ERROR_PREFIX + f"{error}\n".encode())
    finally:
        os._exit(code)


def _change_user(uid: int, gid: int, groups: list[int]) -> None:
    try:
        os.setgroups([*groups, gid])
        os.setresgid(gid, gid, gid)
        os.setresuid(uid, uid, uid)
    except OSError as error:
        raise LookupError(
            f"cannot become user {uid}: a sandbox that was not started by root has only the user root ({error})"
        ) from error


_FORK_ATTEMPTS = 100


class CommandRunner:
    """Runs commands as children of this process and reports their ends.

    Args:
        control: The socket that receives `Ended` and `Failed`.
        free_processes: Called when the process limit prevents a start; kills the processes that may be killed.
    """

    def __init__(self, control: socket.socket, free_processes: Callable[[], None]) -> None:
        self._control, self._free_processes = control, free_processes
        self._running: dict[int, int] = {}  # process id -> id of the request
        self._home = find_user(None)[3]  # root's of the image, whatever an agent writes into /etc/passwd

    def execute(self, command: m.Command, fds: list[int], oom_score: int) -> int | None:
        """Run a command. Return its process id; None if it needed no process or could not be started.

        Args:
            fds: Its standard input, output and error.
            oom_score: Its oom_score_adj.
        """
        if command.call and self._run_inline(command, fds):
            return None
        try:
            pid = self._start(command, fds, oom_score)
        except BlockingIOError as error:
            self.send(m.Failed(f"cannot start a process in the sandbox: {error}", command.id))
        except (OSError, ValueError) as error:  # ValueError: it has a NUL or half a surrogate pair
            missing = isinstance(error, FileNotFoundError)
            self._report_failure(command, fds, m.NOT_FOUND if missing else m.NOT_EXECUTABLE, error)
        else:
            self._running[pid] = command.id
            return pid
        return None

    def runs(self, request: int) -> bool:
        """Whether a command with this request id runs here."""
        return request in self._running.values()

    def kill(self, request: int) -> None:
        """Kill the process group of a command, if it runs here."""
        for pid in [pid for pid, wanted in self._running.items() if wanted == request]:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)

    def reap(self) -> list[int]:
        """Report the commands that have ended. Return the ids of all reaped processes."""
        ended: list[int] = []
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return ended
            if pid == 0:
                return ended
            ended.append(pid)
            if (request := self._running.pop(pid, None)) is not None:
                code = os.waitstatus_to_exitcode(status)
                self.send(m.Ended(request, code if code >= 0 else 128 - code))

    def send(self, message: m.Message) -> None:
        """Send a message on the control socket."""
        m.send(self._control, message)

    def _run_inline(self, command: m.Command, fds: list[int]) -> bool:
        """Run a small call of root in this process, which saves a fork. Return False if it is not such a call."""
        name, *arguments = command.argv
        try:
            if command.user not in ROOT_USERS or not file_calls.is_small(fds, name, *arguments):
                return False
            code = file_calls.CALLS[name](fds, *arguments)
        except Exception as error:  # noqa: BLE001 - the caller's error must not end the sandbox
            self._report_failure(command, fds, m.NOT_EXECUTABLE, error)
        else:
            self.send(m.Ended(command.id, code))
        return True

    def _start(self, command: m.Command, fds: list[int], oom_score: int) -> int:
        """Start a command; at the process limit, free processes and retry.

        Otherwise a fork bomb of the agent would prevent the verifier from grading it.
        """
        forks = command.call or command.groups or command.user not in ROOT_USERS
        start = fork if forks else partial(spawn, home=self._home)
        for _ in range(_FORK_ATTEMPTS):
            try:
                return start(command, fds, oom_score)
            except BlockingIOError:
                self._free_processes()
                time.sleep(0.01)
                self.reap()
        return start(command, fds, oom_score)

    def _report_failure(self, command: m.Command, fds: list[int], code: int, error: Exception) -> None:
        with contextlib.suppress(OSError):
            os.write(fds[2], m.ERROR_PREFIX + f"{error}\n".encode())
        self.send(m.Ended(command.id, code))
