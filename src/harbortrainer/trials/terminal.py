"""Harbor's tmux session with fewer processes: the same keys, the same screens, about half the commands.

Stock runs four a turn (is it alive, type, the whole buffer, the screen); this one types and looks at once.
The socket lies outside /tmp, so that `rm -rf /tmp/*` by the model does not end its own terminal.
"""

from harbor.environments.base import ExecResult

from harbortrainer.harbor_side.terminus import OpenTmux

SOCKET_ENV = {"TMUX_TMPDIR": "/var/tmp"}

_HISTORY_LIMIT = 10_000_000
_NO_TMUX = 127
_NOT_TYPED = 9
# A longer wait is not spent inside a command: remote sandboxes cut those.
_LONGEST_WAIT_INSIDE = 2.0
_SPLIT = "harbortrainer-screen-follows"


class QuickTmux(OpenTmux):
    """See the module. Not for recorded sessions: those keep Harbor's own class."""

    _alive: bool | None = None
    _first_look: ExecResult | None = None

    async def start(self) -> None:
        """Start the session and wait for its prompt; where tmux is missing, install it as Harbor does."""
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
            self._first_look = result

    async def is_session_alive(self) -> bool:
        """Whether the session runs, as of the last look at its screen when nothing happened since."""
        alive, self._alive = self._alive, None
        return await super().is_session_alive() if alive is None else alive

    async def get_incremental_output(self) -> str:
        """What is new in the terminal since the last call, else its screen, as Harbor's does."""
        looked, self._first_look = self._first_look, None
        return await self._news(looked or await self.run_inside(self._look))

    async def type_and_look(self, keystrokes: str, wait_s: float) -> str:
        """Type, wait, and look what is new, in one command where that is possible.

        Raises:
            RuntimeError: The keys cannot be sent: the session has ended.
        """
        typing = self.typing_command(keystrokes)
        if typing is not None and wait_s <= _LONGEST_WAIT_INSIDE:
            wait = f"sleep {wait_s:.3f}; " if wait_s > 0 else ""
            result = await self.run_inside(f"{typing} || exit {_NOT_TYPED}; {wait}{self._look}")
            if result.return_code != _NOT_TYPED:
                return await self._news(result)
        # Also what could not be typed: again, for Harbor's ways out and for its error.
        await self.send_keys(keystrokes, min_timeout_sec=wait_s)
        return await self.get_incremental_output()

    @property
    def _look(self) -> str:
        """Prints the whole buffer and then the visible screen."""
        target = f"-t {self.name}"
        return f"tmux capture-pane -p -S - {target} \\; display-message -p {_SPLIT} \\; capture-pane -p {target}"

    @property
    def _wait_for_prompt(self) -> str:
        """For at most half a second: else one trial in a hundred begins with an empty screen."""
        screen = f"$(tmux capture-pane -p -t {self.name})"
        return f'for i in {{1..25}}; do [[ "{screen}" == *[![:space:]]* ]] && break; sleep 0.02; done'

    async def _news(self, looked: ExecResult) -> str:
        self._alive = looked.return_code == 0
        buffer, _, screen = (looked.stdout or "").rpartition(f"{_SPLIT}\n")
        return await self.news(buffer, screen)
