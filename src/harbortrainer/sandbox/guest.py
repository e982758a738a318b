"""One running sandbox, seen from the host: start it, run commands in it, stop it. Asynchronous throughout.

Invariant: after `stop` has returned no process, mount or control group of the sandbox is left. A command that is
cancelled or runs out of time is killed with its process group; the sandbox lives on.
"""

import asyncio
import itertools
import json
import os
import socket
from dataclasses import dataclass
from typing import Any

from harbortrainer.sandbox import nursery
from harbortrainer.sandbox.errors import SandboxDiedError, SandboxError, SandboxStartError
from harbortrainer.sandbox.pipe import Pipe

_MAX_PACKET = 1 << 20
START_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 30.0


@dataclass(frozen=True)
class Finished:
    """A command that ended: its code (128 + signal when one ended it) and what it wrote."""

    code: int
    stdout: bytes
    stderr: bytes


class Guest:
    """A sandbox that runs. Make it with `await Guest.start(spec)`."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._loop = asyncio.get_running_loop()
        self._ids = itertools.count()
        self._waiting: dict[int, asyncio.Future[int]] = {}
        self._ready: asyncio.Future[list[str]] = self._loop.create_future()
        self._gone: asyncio.Future[None] = self._loop.create_future()
        self._error = ""
        self._loop.add_reader(control, self._readable)
        self.limited: list[str] = []

    @classmethod
    async def start(cls, spec: dict[str, Any], mask: dict[str, Any] | None = None) -> "Guest":
        """Start the sandbox that `spec` describes (see `LocalEnvironment`); SandboxStartError if it cannot."""
        helper = nursery.shared()
        try:
            return await cls._start(helper, spec, mask)
        except SandboxStartError:
            if helper.alive:
                raise
            return await cls._start(nursery.shared(), spec, mask)  # somebody had just killed it

    @classmethod
    async def _start(cls, helper: nursery.Nursery, spec: dict[str, Any], mask: dict[str, Any] | None) -> "Guest":
        guest = cls(helper.start(spec, mask))
        try:
            guest.limited = await asyncio.wait_for(guest._ready, START_TIMEOUT_S)
        except TimeoutError as error:
            await guest.stop()
            raise SandboxStartError(f"the sandbox did not start within {START_TIMEOUT_S:.0f} s") from error
        except BaseException:
            await guest.stop()
            raise
        return guest

    @property
    def alive(self) -> bool:
        """Whether the sandbox's first process still runs, as far as we have heard."""
        return not self._gone.done()

    async def run(
        self,
        argv: list[str],
        *,
        cwd: str = "/",
        env: dict[str, str] | None = None,
        user: str | int | None = None,
        stdin: int | None = None,
        seconds: float | None = None,
        stdout: int | None = None,
        limit: int = 1 << 26,
        call: bool = False,
    ) -> Finished:
        """Run a command to its end.

        Args:
            argv: The command and its arguments; with `call`, a function of `inside.files` and its arguments.
            stdin: A descriptor that the command reads: a pipe or a memfd, never a file of the host's.
            seconds: How long it may take; then its process group is killed and TimeoutError raised.
            stdout: A descriptor that the command writes, instead of into the result: a memfd.
            limit: Bytes kept of each of stdout and stderr.

        Raises:
            SandboxDiedError: The sandbox ended before the command did.
        """
        self._check_alive()
        out, err = Pipe(limit), Pipe(limit)
        number = next(self._ids)
        done = self._waiting[number] = self._loop.create_future()
        request = {"op": "exec", "id": number, "argv": argv, "call": call, "cwd": cwd, "env": env or {}, "user": user}
        try:
            await self._send_exec(request, out, err, stdin, stdout)
            code = await asyncio.wait_for(done, seconds)
            return Finished(code, out.finish(), err.finish())
        except BaseException:
            await self._kill(number)
            raise
        finally:
            self._waiting.pop(number, None)
            out.close()
            err.close()

    async def stop(self) -> None:
        """End the sandbox and wait until nothing of it is left."""
        if not self._gone.done():
            self._control.shutdown(socket.SHUT_WR)
            try:
                await asyncio.wait_for(asyncio.shield(self._gone), STOP_TIMEOUT_S)
            except TimeoutError as error:
                raise SandboxError(f"the sandbox did not end within {STOP_TIMEOUT_S:.0f} s") from error
        self._control.close()

    async def _send_exec(
        self, request: dict[str, Any], out: Pipe, err: Pipe, stdin: int | None, stdout: int | None
    ) -> None:
        null = os.open(os.devnull, os.O_RDONLY) if stdin is None else -1
        try:
            fds = [null if stdin is None else stdin, out.write_end if stdout is None else stdout, err.write_end]
            await self._send(request, fds)
        finally:
            if null >= 0:
                os.close(null)
        out.started()
        err.started()

    async def _send(self, request: dict[str, Any], fds: list[int]) -> None:
        data = json.dumps(request).encode()
        while True:
            try:
                socket.send_fds(self._control, [data], fds)
            except BlockingIOError:
                await asyncio.sleep(0.005)
            except OSError as error:
                self._check_alive()
                raise SandboxDiedError(f"cannot reach the sandbox: {error}") from error
            else:
                return

    async def _kill(self, number: int) -> None:
        if not self._gone.done():
            await asyncio.shield(self._send({"op": "kill", "id": number}, []))

    def _check_alive(self) -> None:
        if self._gone.done():
            raise SandboxDiedError(self._error or "the sandbox has ended")

    def _readable(self) -> None:
        while True:
            try:
                data = self._control.recv(_MAX_PACKET)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            if not data:
                self._ended()
                return
            self._received(json.loads(data))

    def _received(self, message: dict[str, Any]) -> None:
        if "ready" in message:
            if not self._ready.done():
                self._ready.set_result(message["limited"])
        elif "id" not in message:
            self._error = message["error"]
        elif (waiter := self._waiting.get(message["id"])) is not None and not waiter.done():
            if "code" in message:
                waiter.set_result(message["code"])
            else:
                waiter.set_exception(SandboxError(message["error"]))

    def _ended(self) -> None:
        self._loop.remove_reader(self._control)
        if not self._gone.done():
            self._gone.set_result(None)
        if not self._ready.done():
            self._ready.set_exception(SandboxStartError(self._error or "the sandbox ended while it was starting"))
        for waiter in self._waiting.values():
            if not waiter.done():
                waiter.set_exception(SandboxDiedError(self._error or "the sandbox ended while a command was running"))
