"""Reusable bash shell in a container, which replaces one `docker exec` per command, and Harbor's Compose arguments.

Harbor requires bash in every main container, so nothing has to be installed. The shell reads one line per command and
runs it as `docker exec` would: own process group, folder and variables, both outputs merged. It then prints the exit
code after a random mark that no process inside can know in advance. If a background process still holds the shell's
output, the shell is not reused.

Invariant: a command runs at most once, and its output has nothing of another command.
"""

import asyncio
import re
import secrets
from dataclasses import dataclass, field

import aiohttp
from aiodocker.containers import DockerContainer
from aiodocker.stream import Stream

from harbortrainer.sandbox.compose_files import MAIN

_OPTIONS_WITH_VALUE = ("-w", "-e", "-u")


@dataclass
class ServiceCommand:
    """Command for the main service. None means the container's default."""

    argv: list[str]
    cwd: str | None = None
    user: str = ""
    env: dict[str, str] = field(default_factory=dict)


def parse_exec(words: list[str]) -> ServiceCommand | None:
    """Parse `exec [-T] [-w DIR] [-u USER] [-e NAME=VALUE]... main WORD...`; None for anything else."""
    command, rest = ServiceCommand([]), words[1:] if words[:1] == ["exec"] else []
    while rest and rest[0] != MAIN:
        option, rest = rest[0], rest[1:]
        if option == "-T":
            continue
        if option not in _OPTIONS_WITH_VALUE or not rest:
            return None
        value, rest = rest[0], rest[1:]
        if option == "-w":
            command.cwd = value
        elif option == "-u":
            command.user = value
        else:
            name, _, text = value.partition("=")
            command.env[name] = text
    command.argv = rest[1:]
    return command if command.argv else None


def parse_upload(words: list[str]) -> tuple[str, str] | None:
    """Parse `cp SOURCE main:TARGET` into (source, target); None for anything else."""
    match words:
        case ["cp", source, target] if target.startswith(f"{MAIN}:"):
            return source, target.removeprefix(f"{MAIN}:")
    return None


_READY = b"harbortrainer-ready"
_READY_S = 60.0
_KILLED = 137
# Without job control, a script's `kill 0` would kill this shell too.
_SCRIPT = r"""
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
_BASH_VARIABLES = re.compile(
    r"_|BASH.*|COMP_.*|DIRSTACK|E?UID|EPOCH.*|FUNCNAME|GROUPS|HISTCMD|LINENO|OLDPWD|POSIXLY_CORRECT|PPID|PWD|S?RANDOM|"
    r"SECONDS|SHELLOPTS|SHLVL|TMOUT"
)
_UNESCAPED = frozenset(range(0x20, 0x7F)) - {ord("'"), ord("\\")}


def can_run(command: ServiceCommand) -> bool:
    """Return whether the shell can run the command exactly as `docker exec` would."""
    names = all(_NAME.fullmatch(name) and not _BASH_VARIABLES.fullmatch(name) for name in command.env)
    return names and not any("\0" in text for text in (*command.argv, *command.env.values(), command.cwd or ""))


def _quote(text: str) -> str:
    """Quote text as one bash word, in one line of ASCII."""
    raw = text.encode(errors="surrogateescape")
    return "$'" + "".join(chr(byte) if byte in _UNESCAPED else f"\\{byte:03o}" for byte in raw) + "'"


def _script_line(command: ServiceCommand, folder: str, begin: str, end: str) -> str:
    exports = "".join(f"export {name}={_quote(text)}; " for name, text in command.env.items())
    words = " ".join(_quote(word) for word in command.argv)
    inside = f"exec 3<&- 2>&1; cd -P -- {_quote(folder)} || exit 126; export -n PWD OLDPWD; {exports}exec -- {words}"
    return f"printf {begin}; ({inside}); ended $? {end}\n"


@dataclass(frozen=True)
class ShellResult:
    """Result of a command."""

    code: int
    output: bytes
    reusable: bool
    """Whether the shell can run another command."""


class ContainerShell:
    """A started shell. Create it with `await ContainerShell.open(...)`; it runs one command at a time."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._unread = bytearray()

    @classmethod
    async def open(cls, container: DockerContainer, user: str) -> "ContainerShell | None":
        """Open a shell as a user; None if the container lacks bash or the user.

        Raises:
            DockerError: The container does not run, or the daemon does not answer.
        """
        started = await container.exec(["bash", "-c", _SCRIPT], stdin=True, user=user)
        shell = cls(started.start(detach=False))
        try:
            async with asyncio.timeout(_READY_S):
                if await shell._read_until(_READY) is not None:
                    return shell
        except TimeoutError:
            pass
        except BaseException:
            await shell.close()
            raise
        await shell.close()
        return None

    async def run(self, command: ServiceCommand, folder: str) -> ShellResult | None:
        """Run a command in a folder; None if the shell had already ended and nothing was run."""
        begin, end = secrets.token_hex(16), secrets.token_hex(16)
        try:
            await self._stream.write_in(_script_line(command, folder, begin, end).encode())
        except (AssertionError, OSError, aiohttp.ClientError):  # aiodocker asserts that it is connected
            return None
        if await self._read_until(begin.encode()) is None:
            return None
        output = await self._read_until(end.encode())
        how = None if output is None else await self._read_until(b"\n")
        if output is None or how is None:  # a process inside killed the shell
            return ShellResult(_KILLED, output or bytes(self._unread), reusable=False)
        code, _, held = how.decode().partition(" ")
        return ShellResult(int(code), output, reusable=not held)

    async def close(self) -> None:
        """Close the stream. The shell ends when its present command has ended."""
        await self._stream.close()

    async def _read_until(self, mark: bytes) -> bytes | None:
        """Return the output before the mark, and drop the mark; None if the shell ends first."""
        searched = 0
        while (at := self._unread.find(mark, searched)) < 0:
            searched = max(0, len(self._unread) - len(mark))
            if (message := await self._stream.read_out()) is None:
                return None
            self._unread += message.data
        output = bytes(self._unread[:at])
        del self._unread[: at + len(mark)]
        return output
