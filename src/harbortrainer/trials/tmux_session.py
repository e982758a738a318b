"""Harbor's tmux session with fewer commands per turn, for the same keys and screens.

- Harbor runs four commands per turn: alive check, keys, whole buffer, screen. `FastTmuxSession` sends keys and captures
  the screen in one command.
- If the sandbox allows interactive processes, as the local one does, a tmux client in control mode (`tmux -C`) stays
  open, and turns need no command at all. This is `TmuxControl`. tmux reads commands line by line and answers each in a
  block between `%begin` and `%end` or `%error`. A pane's content may look like such lines, so each answer is delimited
  by unpredictable marks.
- The socket is outside /tmp, so that `rm -rf /tmp/*` by the model does not end its own terminal.
"""

import asyncio
import itertools
import re
import secrets
import shlex
from dataclasses import dataclass

from harbor.environments.base import ExecResult

from harbortrainer.harbor_compat.terminus import OpenTmux
from harbortrainer.sandbox.interactive_process import (
    HasInteractiveProcess,
    InteractiveProcess,
    InteractiveProcessEndedError,
)

_UNQUOTABLE = {"'": '"\'"', "\n": '"\\n"', "\r": '"\\r"'}
_SHELL_LEVEL = {"SHLVL": "1"}  # as if a shell had started tmux; the session inherits it
_LOGIN_SHELL, _PANE_LOG = "bash --login", "cat > "
# No notifications of pane output, and this client's size does not affect the window.
_CLIENT_FLAGS = "no-output,ignore-size"


def control_command(start: str, name: str, history: int) -> tuple[list[str], dict[str, str]]:
    """Return arguments and variables of a control-mode client that starts a session and attaches to it.

    Args:
        start: Shell command that starts the session: `export A=b && ... && tmux new-session ...`.
        name: Name of the session.
        history: Buffer size of later windows, in lines.
    """
    *exports, command = _commands(shlex.split(start))
    variables = _SHELL_LEVEL | dict(words[1].split("=", 1) for words in exports)
    argv = [command[0], "-C"]
    for word in command[1:]:
        if word == _LOGIN_SHELL:
            argv += word.split()  # as separate words, so that tmux starts it without another shell
        else:
            argv.append(f"exec {word}" if word.startswith(_PANE_LOG) else word)
    argv += [";", "set-option", "-g", "history-limit", str(history)]
    return [*argv, ";", "attach-session", "-t", name, "-f", _CLIENT_FLAGS], variables


def _commands(words: list[str]) -> list[list[str]]:
    commands: list[list[str]] = [[]]
    for word in words:
        if word == "&&":
            commands.append([])
        else:
            commands[-1].append(word)
    return commands


class TmuxControl:
    """Control-mode client of the session `name`. Methods raise InteractiveProcessEndedError if the client has ended."""

    def __init__(self, process: InteractiveProcess, name: str) -> None:
        self._process, self._name = process, name

    async def type(self, keys: str) -> bool:
        """Send keys. Returns False if they were not sent because tmux refused them."""
        if keys.endswith(";"):
            return False  # as a last program argument it separates tmux commands, but here it would be typed
        (answer,) = await self._run(f"send-keys -t {self._name} -- {quoted(keys)}")
        return answer is not None

    async def capture(self) -> tuple[str, str] | None:
        """Return the whole buffer and the visible screen; None if tmux refuses."""
        target = f"-t {self._name}"
        buffer, screen = await self._run(f"capture-pane -p -S - {target}", f"capture-pane -p {target}")
        return None if buffer is None or screen is None else (buffer, screen)

    async def _run(self, *commands: str) -> list[str | None]:
        """Return the output of each command; None for a failed command and those after it."""
        mark = secrets.token_hex(16)
        marks = [f"{mark}{number}" for number in range(len(commands) + 1)]
        marked = [f"{command} ; display-message -p {after}" for command, after in zip(commands, marks[1:], strict=True)]
        # One line, so that no output comes in between. The last mark is repeated, since an error ends its line.
        lines = f"display-message -p {marks[0]}\n{' ; '.join(marked)}\ndisplay-message -p {mark}\n"
        answer = await self._process.query(lines.encode(), f"\n{mark}\n%end ".encode())
        return [_block(answer, *pair) for pair in itertools.pairwise(marks)]


def quoted(keys: str) -> str:
    """Quote `keys` as one word of a tmux command line."""
    return "'" + re.sub("['\n\r]", lambda found: f"'{_UNQUOTABLE[found[0]]}'", keys) + "'"


def _block(answer: bytes, before: str, after: str) -> str | None:
    """Return the content of the block between two marks."""
    _, found, rest = answer.partition(f"\n{before}\n%end ".encode())
    inside, followed, _ = rest.partition(f"\n{after}\n%end ".encode())
    begin = re.search(rb"^%begin (.*)\n", inside, re.MULTILINE)
    if not found or not followed or begin is None:
        return None
    end = inside.rfind(b"%end " + begin[1] + b"\n")
    return inside[begin.end() : end].decode(errors="replace") if end >= begin.end() else None


SOCKET_ENV = {"TMUX_TMPDIR": "/var/tmp"}

_HISTORY_LIMIT = 10_000_000
_NO_TMUX = 127
_NOT_TYPED = 9
# Longer waits are not part of a command, since remote sandboxes limit a command's time.
_MAX_WAIT_INSIDE_S = 2.0
_SEPARATOR = "harbortrainer-screen-follows"
_PROMPT_CAPTURES, _PROMPT_WAIT_S = 25, 0.02
# Captures in control mode are cheap: enough for the first prompt on a busy machine.
_CONTROL_CAPTURES = 100


@dataclass(frozen=True)
class _Capture:
    """A capture of the terminal: whole buffer, visible screen, and whether the session runs."""

    buffer: str
    screen: str
    alive: bool


class FastTmuxSession(OpenTmux):
    """Harbor's tmux session with fewer commands. Recorded sessions use Harbor's own class."""

    _control: TmuxControl | None = None
    _control_user: str | int | None = None
    _alive: bool | None = None
    _first_capture: _Capture | None = None

    async def start(self) -> None:
        """Start the session and wait for its prompt. If tmux is missing, install it as Harbor does."""
        if await self._start_in_control_mode():
            return
        script = (
            f"command -v tmux >/dev/null || exit {_NO_TMUX}; mkdir -p {SOCKET_ENV['TMUX_TMPDIR']}; "
            f"{self.start_command} || exit 1; "
            f"tmux set-option -g history-limit {_HISTORY_LIMIT}; {self._wait_for_prompt}; {self._capture_command}"
        )
        result = await self.run_inside(script)
        if result.return_code == _NO_TMUX:
            await super().start()
        elif result.return_code != 0:
            raise RuntimeError(f"cannot start tmux: {result.stderr or result.stdout}")
        else:
            self._first_capture = _capture_of(result)

    async def is_session_alive(self) -> bool:
        """Whether the session runs; uses the last capture if nothing happened since."""
        alive, self._alive = self._alive, None
        return await super().is_session_alive() if alive is None else alive

    async def get_incremental_output(self) -> str:
        """Return the new output since the last call, or the screen if there is none, as Harbor's method does."""
        capture, self._first_capture = self._first_capture, None
        capture = capture or await self._capture_in_control_mode()
        return await self._new_output(capture or _capture_of(await self.run_inside(self._capture_command)))

    async def type_and_wait(self, keystrokes: str, wait_s: float) -> None:
        """Send keys and wait.

        Raises:
            RuntimeError: The keys cannot be sent, since the session has ended.
        """
        if await self._type_in_control_mode(keystrokes):
            await asyncio.sleep(wait_s)
        else:
            await self.send_keys(keystrokes, min_timeout_sec=wait_s)

    async def type_and_capture(self, keystrokes: str, wait_s: float) -> str:
        """Send keys, wait, and return the new output, in one command if possible.

        Raises:
            RuntimeError: The keys cannot be sent, since the session has ended.
        """
        typing = self.typing_command(keystrokes)
        if self._usable_control is None and typing is not None and wait_s <= _MAX_WAIT_INSIDE_S:
            wait = f"sleep {wait_s:.3f}; " if wait_s > 0 else ""
            result = await self.run_inside(f"{typing} || exit {_NOT_TYPED}; {wait}{self._capture_command}")
            if result.return_code != _NOT_TYPED:
                return await self._new_output(_capture_of(result))
        # Also retries keys that could not be sent, with Harbor's fallbacks and its error.
        await self.type_and_wait(keystrokes, wait_s)
        return await self.get_incremental_output()

    async def _start_in_control_mode(self) -> bool:
        """Start the session with a control-mode client. Returns False if that is impossible and nothing was started."""
        if not isinstance(self.environment, HasInteractiveProcess):
            return False
        argv, variables = control_command(self.start_command, self.name, _HISTORY_LIMIT)
        process = await self.environment.start_interactive(argv, env=variables, user=self._user)
        self._control, self._control_user = TmuxControl(process, self.name), self._current_user
        for _ in range(_CONTROL_CAPTURES):
            self._first_capture = await self._capture_in_control_mode()
            if self._first_capture is None or self._first_capture.screen.strip():
                break
            await asyncio.sleep(_PROMPT_WAIT_S)
        return self._control is not None

    @property
    def _current_user(self) -> str | int | None:
        """User that a command in the sandbox would run as; a step may have its own."""
        return self.environment.default_user if self._user is None else self._user

    @property
    def _usable_control(self) -> TmuxControl | None:
        """The control-mode client; None also while commands run as another user, who may not access its terminal."""
        return self._control if self._current_user == self._control_user else None

    async def _capture_in_control_mode(self) -> _Capture | None:
        """Capture the terminal; None if there is no client or it has ended, with the session or killed from inside."""
        try:
            control = self._usable_control
            if control is not None and (captured := await control.capture()) is not None:
                return _Capture(*captured, alive=True)
        except InteractiveProcessEndedError:
            self._control = None
        return None

    async def _type_in_control_mode(self, keystrokes: str) -> bool:
        try:
            control = self._usable_control
            typeable = control is not None and self.typing_command(keystrokes) is not None
            return typeable and control is not None and await control.type(keystrokes)
        except InteractiveProcessEndedError:
            self._control = None
            return False

    @property
    def _capture_command(self) -> str:
        """Shell command that prints the whole buffer and then the visible screen."""
        target = f"-t {self.name}"
        return f"tmux capture-pane -p -S - {target} \\; display-message -p {_SEPARATOR} \\; capture-pane -p {target}"

    @property
    def _wait_for_prompt(self) -> str:
        """Shell command that waits up to 0.5 s for the prompt; else 1 in 100 trials starts with an empty screen."""
        screen = f"$(tmux capture-pane -p -t {self.name})"
        loop = f"for i in {{1..{_PROMPT_CAPTURES}}}"
        return f'{loop}; do [[ "{screen}" == *[![:space:]]* ]] && break; sleep {_PROMPT_WAIT_S}; done'

    async def _new_output(self, capture: _Capture) -> str:
        self._alive = capture.alive
        return await self.new_output(capture.buffer, capture.screen)


def _capture_of(result: ExecResult) -> _Capture:
    buffer, _, screen = (result.stdout or "").rpartition(f"{_SEPARATOR}\n")
    return _Capture(buffer, screen, alive=result.return_code == 0)
