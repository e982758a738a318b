"""Child programs that end with this process, together with their own children and mounts.

A child runs in its own process and mount namespace, so even `kill -9` of the trainer leaves no processes or mounts. The
caller removes the files that it wrote.
"""

import asyncio
import contextlib
import os
import signal
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import IO

from harbortrainer.sandbox.build_log import shorten_instructions, whole_end

_WRAPPER = (
    *("setpriv", "--pdeathsig", "KILL", "--"),
    *("unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc", "--"),
)
_TAIL_CHARS = 2000
_SEARCHED_CHARS = 100_000
_KILLED = (-signal.SIGKILL, 128 + signal.SIGKILL)


@dataclass(frozen=True)
class Output:
    """Exit code (-1 after a timeout) and output of a program."""

    code: int
    out: str
    err: str

    @property
    def tail(self) -> str:
        """The end of the output, at most 2000 characters in whole lines."""
        output = f"{self.out}\n{self.err}".strip()[-_SEARCHED_CHARS:]
        return whole_end(shorten_instructions(output), _TAIL_CHARS)


async def run_child(
    argv: Sequence[str],
    *,
    env: Mapping[str, str] | None = None,
    seconds: float | None = None,
    isolated: bool = True,
    out: IO[bytes] | None = None,
) -> Output:
    """Run a program to its end.

    Args:
        env: Additional environment variables.
        seconds: Timeout.
        isolated: Whether it gets its own namespaces, which requires root.
        out: A file for its standard output, which is then missing from the result.
    """
    with tempfile.TemporaryFile() as own_out, tempfile.TemporaryFile() as err:
        process = await asyncio.create_subprocess_exec(
            *(_WRAPPER if isolated else _WRAPPER[:4]),
            *argv,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=out or own_out,
            stderr=err,
            env={**os.environ, **(env or {})},
            cwd="/",
        )
        reason = ""
        try:
            code = await asyncio.wait_for(process.wait(), seconds)
        except TimeoutError:
            code, reason = -1, f"{argv[0]} did not end within {seconds:.0f} s"
        finally:
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
                await process.wait()
        if code in _KILLED:
            reason = f"{argv[0]} was killed, by a user or because memory ran out"
        return Output(code, _read(own_out), f"{_read(err)}\n{reason}".lstrip() if reason else _read(err))


def _read(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode(errors="replace")
