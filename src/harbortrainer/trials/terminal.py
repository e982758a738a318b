"""Harbor's tmux session with fewer processes: the same keys, the same screens, about half the commands.

Stock runs four a turn (is it alive, type, the whole buffer, the screen); this one types and looks at once, and where
a command can be talked to while it runs (the local sandbox), over one line that stays open: no command at all.
The socket lies outside /tmp, so that `rm -rf /tmp/*` by the model does not end its own terminal.
"""

import asyncio
from dataclasses import dataclass

from harbor.environments.base import ExecResult

from harbortrainer.harbor_side.terminus import OpenTmux
from harbortrainer.sandbox.conversation import ConversationOverError, Converses
from harbortrainer.trials.control_line import ControlLine, control_command

SOCKET_ENV = {"TMUX_TMPDIR": "/var/tmp"}

_HISTORY_LIMIT = 10_000_000
_NO_TMUX = 127
_NOT_TYPED = 9
# A longer wait is not spent inside a command: remote sandboxes cut those.
_LONGEST_WAIT_INSIDE = 2.0
_SPLIT = "harbortrainer-screen-follows"
_PROMPT_LOOKS, _PROMPT_WAIT_S = 25, 0.02
# Over a line looks cost nothing, and take no time: as many as the first prompt takes on a busy machine.
_LOOKS_OVER_LINE = 100


@dataclass(frozen=True)
class _Looked:
    """A look at the terminal: the whole buffer, the visible screen, and whether the session runs."""

    buffer: str
    screen: str
    alive: bool


class QuickTmux(OpenTmux):
    """See the module. Not for recorded sessions: those keep Harbor's own class."""

    _line: ControlLine | None = None
    _lines_user: str | int | None = None
    _alive: bool | None = None
    _first_look: _Looked | None = None

    async def start(self) -> None:
        """Start the session and wait for its prompt; where tmux is missing, install it as Harbor does."""
        if await self._started_on_a_line():
            return
        script = (
            f"command -v tmux >/dev/null || exit {_NO_TMUX}; mkdir -p {SOCKET_ENV['TMUX_TMPDIR']}; "
            f"{self.start_command} || exit 1; "
            f"tmux set-option -g history-limit {_HISTORY_LIMIT}; {self._wait_for_prompt}; {self._look}"
        )
        result = await self.run_inside(script)
        if result.return_code == _NO_TMUX:
            await super().start()
        elif result.return_code != 0:
            raise RuntimeError(f"cannot start tmux: {result.stderr or result.stdout}")
        else:
            self._first_look = _looked(result)

    async def is_session_alive(self) -> bool:
        """Whether the session runs, as of the last look at its screen when nothing happened since."""
        alive, self._alive = self._alive, None
        return await super().is_session_alive() if alive is None else alive

    async def get_incremental_output(self) -> str:
        """What is new in the terminal since the last call, else its screen, as Harbor's does."""
        looked, self._first_look = self._first_look, None
        return await self._news(looked or await self._looked_over_line() or _looked(await self.run_inside(self._look)))

    async def type_and_wait(self, keystrokes: str, wait_s: float) -> None:
        """Type and wait.

        Raises:
            RuntimeError: The keys cannot be sent: the session has ended.
        """
        if await self._typed_over_line(keystrokes):
            await asyncio.sleep(wait_s)
        else:
            await self.send_keys(keystrokes, min_timeout_sec=wait_s)

    async def type_and_look(self, keystrokes: str, wait_s: float) -> str:
        """Type, wait, and look what is new, in one command where that is possible.

        Raises:
            RuntimeError: The keys cannot be sent: the session has ended.
        """
        typing = self.typing_command(keystrokes)
        if self._open_line is None and typing is not None and wait_s <= _LONGEST_WAIT_INSIDE:
            wait = f"sleep {wait_s:.3f}; " if wait_s > 0 else ""
            result = await self.run_inside(f"{typing} || exit {_NOT_TYPED}; {wait}{self._look}")
            if result.return_code != _NOT_TYPED:
                return await self._news(_looked(result))
        # Also what could not be typed: again, for Harbor's ways out and for its error.
        await self.type_and_wait(keystrokes, wait_s)
        return await self.get_incremental_output()

    async def _started_on_a_line(self) -> bool:
        """Start it so that one line to it stays open; False where that cannot be, and nothing was started."""
        if not isinstance(self.environment, Converses):
            return False
        argv, variables = control_command(self.start_command, self.name, _HISTORY_LIMIT)
        conversation = await self.environment.converse(argv, env=variables, user=self._user)
        self._line, self._lines_user = ControlLine(conversation, self.name), self._user_now
        for _ in range(_LOOKS_OVER_LINE):
            self._first_look = await self._looked_over_line()
            if self._first_look is None or self._first_look.screen.strip():
                break
            await asyncio.sleep(_PROMPT_WAIT_S)
        return self._line is not None

    @property
    def _user_now(self) -> str | int | None:
        """Whom a command in the sandbox would be run as: a step may have a user of its own."""
        return self.environment.default_user if self._user is None else self._user

    @property
    def _open_line(self) -> ControlLine | None:
        """None also while commands are another user's than the line's, who may not speak to its terminal."""
        return self._line if self._user_now == self._lines_user else None

    async def _looked_over_line(self) -> _Looked | None:
        """None where there is no line, or it is cut: by the end of the session, or by what runs in it."""
        try:
            line = self._open_line
            if line is not None and (seen := await line.look()) is not None:
                return _Looked(*seen, alive=True)
        except ConversationOverError:
            self._line = None
        return None

    async def _typed_over_line(self, keystrokes: str) -> bool:
        try:
            line = self._open_line
            typeable = line is not None and self.typing_command(keystrokes) is not None
            return typeable and line is not None and await line.type(keystrokes)
        except ConversationOverError:
            self._line = None
            return False

    @property
    def _look(self) -> str:
        """Prints the whole buffer and then the visible screen."""
        target = f"-t {self.name}"
        return f"tmux capture-pane -p -S - {target} \\; display-message -p {_SPLIT} \\; capture-pane -p {target}"

    @property
    def _wait_for_prompt(self) -> str:
        """For at most half a second: else one trial in a hundred begins with an empty screen."""
        screen = f"$(tmux capture-pane -p -t {self.name})"
        looks = f"for i in {{1..{_PROMPT_LOOKS}}}"
        return f'{looks}; do [[ "{screen}" == *[![:space:]]* ]] && break; sleep {_PROMPT_WAIT_S}; done'

    async def _news(self, looked: _Looked) -> str:
        self._alive = looked.alive
        return await self.news(looked.buffer, looked.screen)


def _looked(result: ExecResult) -> _Looked:
    buffer, _, screen = (result.stdout or "").rpartition(f"{_SPLIT}\n")
    return _Looked(buffer, screen, alive=result.return_code == 0)
