"""Harbor's tmux session with fewer processes: the same keys, the same screens, about half the commands.

Stock asks three times a turn (is it alive, the whole buffer, the screen); this one asks once.
The socket lies outside /tmp, so that `rm -rf /tmp/*` by the model does not end its own terminal.
"""

from harbor.agents.terminus_2.tmux_session import TmuxSession

SOCKET_ENV = {"TMUX_TMPDIR": "/var/tmp"}

_HISTORY_LIMIT = 10_000_000
_NO_TMUX = 127
_SPLIT = "harbortrainer-screen-follows"


class QuickTmux(TmuxSession):
    """See the module. Not for recorded sessions: those keep Harbor's own class."""

    _alive: bool | None = None

    async def start(self) -> None:
        """Start the session; where tmux is missing, install it as Harbor does."""
        script = (
            f"command -v tmux >/dev/null || exit {_NO_TMUX}; mkdir -p {SOCKET_ENV['TMUX_TMPDIR']}; "
            f"{self._tmux_start_session} && "
            f"{{ tmux set-option -g history-limit {_HISTORY_LIMIT} || true; }}"
        )
        result = await self.environment.exec(command=script, user=self._user)
        if result.return_code == _NO_TMUX:
            await super().start()
        elif result.return_code != 0:
            raise RuntimeError(f"cannot start tmux: {result.stderr or result.stdout}")

    async def is_session_alive(self) -> bool:
        """Whether the session runs, as of the last look at its screen when nothing happened since."""
        alive, self._alive = self._alive, None
        return await super().is_session_alive() if alive is None else alive

    async def get_incremental_output(self) -> str:
        """What is new in the terminal since the last call, else its screen, as Harbor's does."""
        buffer, screen = await self._look()
        if self._previous_buffer is None:
            self._previous_buffer = buffer
            return f"Current Terminal Screen:\n{screen}"
        new = await self._find_new_content(buffer)
        self._previous_buffer = buffer
        if new is not None and new.strip():
            return f"New Terminal Output:\n{new}"
        return f"Current Terminal Screen:\n{screen}"

    async def _look(self) -> tuple[str, str]:
        """The whole buffer and the visible screen, in one command."""
        target = f"-t {self._session_name}"
        result = await self.environment.exec(
            command=f"tmux capture-pane -p -S - {target} \\; display-message -p {_SPLIT} \\; capture-pane -p {target}",
            user=self._user,
        )
        self._alive = result.return_code == 0
        buffer, _, screen = (result.stdout or "").rpartition(f"{_SPLIT}\n")
        return buffer, screen
