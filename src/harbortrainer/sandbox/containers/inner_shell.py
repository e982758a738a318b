"""A shell in a container that runs command after command, in place of a `docker exec` for each.

It is bash, which Harbor asks of every main container: no Python, no program of ours, nothing to build for another
processor. It gets a line for each command, runs it as `docker exec` would (process group, folder, variables of its own;
both outputs in one, as Harbor's Docker has them) and says after it, with a mark that nobody inside knows before, how it
ended. What a command leaves running may go on writing where this shell writes: then the shell is not used again.
Invariant: a command is run at most once, and its output holds nothing of another's.
"""

import asyncio
import re
import secrets
from dataclasses import dataclass

import aiohttp
from aiodocker.containers import DockerContainer
from aiodocker.stream import Stream

from harbortrainer.sandbox.containers.exec_words import ServiceCommand

_READY = b"harbortrainer-ready"
_READY_S = 60.0
_KILLED = 137
# Without job control `kill 0`, which scripts use to end all that they started, would end this shell too.
_LOOP = r"""
set -m; unset SHLVL OLDPWD; exec 3<&0 </dev/null 2>/dev/null
ended() {
  local f held=
  for f in /proc/[0-9]*/fd/[12]; do
    [[ $f -ef /proc/$$/fd/1 && $f != /proc/$$/* ]] && held=held && break
  done
  printf '%s%d %s\n' "$2" "$1" "$held"
}
printf harbortrainer-ready
while IFS= read -r -u 3 line; do eval "$line"; done
"""
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_BASHS_OWN = re.compile(
    r"_|BASH.*|COMP_.*|DIRSTACK|E?UID|EPOCH.*|FUNCNAME|GROUPS|HISTCMD|LINENO|OLDPWD|POSIXLY_CORRECT|PPID|PWD|S?RANDOM|"
    r"SECONDS|SHELLOPTS|SHLVL|TMOUT"
)
_AS_IT_IS = frozenset(range(0x20, 0x7F)) - {ord("'"), ord("\\")}


def can_run(command: ServiceCommand) -> bool:
    """Whether the shell can run it exactly as `docker exec` would."""
    names = all(_NAME.fullmatch(name) and not _BASHS_OWN.fullmatch(name) for name in command.env)
    return names and not any("\0" in text for text in (*command.argv, *command.env.values(), command.cwd or ""))


def _quoted(text: str) -> str:
    """As one word of bash, in one line of ASCII."""
    raw = text.encode(errors="surrogateescape")
    return "$'" + "".join(chr(byte) if byte in _AS_IT_IS else f"\\{byte:03o}" for byte in raw) + "'"


def _line(command: ServiceCommand, folder: str, begin: str, end: str) -> str:
    exports = "".join(f"export {name}={_quoted(text)}; " for name, text in command.env.items())
    words = " ".join(_quoted(word) for word in command.argv)
    inside = f"exec 3<&- 2>&1; cd -P -- {_quoted(folder)} || exit 126; export -n PWD OLDPWD; {exports}exec -- {words}"
    return f"printf {begin}; ({inside}); ended $? {end}\n"


@dataclass(frozen=True)
class Ran:
    """How a command ended."""

    code: int
    said: bytes
    reusable: bool
    """Whether the shell can run another."""


class InnerShell:
    """A shell that was started. Make it with `await InnerShell.open(...)`; one command at a time."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._unread = bytearray()

    @classmethod
    async def open(cls, container: DockerContainer, user: str) -> "InnerShell | None":
        """A shell of that user's; None where there is no bash, or no such user.

        Raises:
            DockerError: The container does not run, or the daemon does not answer.
        """
        started = await container.exec(["bash", "-c", _LOOP], stdin=True, user=user)
        shell = cls(started.start(detach=False))
        try:
            async with asyncio.timeout(_READY_S):
                if await shell._until(_READY) is not None:
                    return shell
        except TimeoutError:
            pass
        except BaseException:
            await shell.close()
            raise
        await shell.close()
        return None

    async def run(self, command: ServiceCommand, folder: str) -> Ran | None:
        """Run a command in a folder; None when the shell had ended before, so that nothing was run."""
        begin, end = secrets.token_hex(16), secrets.token_hex(16)
        try:
            await self._stream.write_in(_line(command, folder, begin, end).encode())
        except (AssertionError, OSError, aiohttp.ClientError):  # aiodocker asserts that it is connected
            return None
        if await self._until(begin.encode()) is None:
            return None
        said = await self._until(end.encode())
        how = None if said is None else await self._until(b"\n")
        if said is None or how is None:  # somebody inside has killed it
            return Ran(_KILLED, said or bytes(self._unread), reusable=False)
        code, _, held = how.decode().partition(" ")
        return Ran(int(code), said, reusable=not held)

    async def close(self) -> None:
        """Let go of it: it ends when the command that it runs has ended."""
        await self._stream.close()

    async def _until(self, mark: bytes) -> bytes | None:
        """What it says before the mark, which is taken off too; None when it ends first."""
        looked = 0
        while (at := self._unread.find(mark, looked)) < 0:
            looked = max(0, len(self._unread) - len(mark))
            if (message := await self._stream.read_out()) is None:
                return None
            self._unread += message.data
        said = bytes(self._unread[:at])
        del self._unread[: at + len(mark)]
        return said
