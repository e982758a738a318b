"""The host's side of one running sandbox: start it, run commands in it, stop it. All of it is asynchronous.

Invariants:
- After `stop` returns, no process, mount or control group of the sandbox is left.
- A command that is cancelled or times out is killed with its process group. The sandbox keeps running.
"""

import asyncio
import itertools
import os
import socket
from dataclasses import dataclass, replace

from harbortrainer.sandbox import fork_server_client
from harbortrainer.sandbox.build_log import whole_end
from harbortrainer.sandbox.errors_and_changes import SandboxDiedError, SandboxError, SandboxStartError
from harbortrainer.sandbox.inside import messages as m

_CHUNK = 1 << 18
_MAX_OUTPUT = 1 << 26


class Pipe:
    """Reads a command's output from a pipe. Bytes after the first 64 MiB are discarded, so nothing blocks."""

    def __init__(self) -> None:
        self._read, self.write_end = os.pipe()
        os.set_blocking(self._read, False)
        self._budget = _MAX_OUTPUT
        self._chunks: list[bytes] = []
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._read, self._readable)

    def _readable(self) -> bool:
        """Read once. Returns whether more may be available."""
        try:
            chunk = os.read(self._read, _CHUNK)
        except BlockingIOError:
            return False
        if not chunk:
            self._loop.remove_reader(self._read)
            return False
        kept = chunk[: self._budget]
        self._budget -= len(kept)
        self._chunks.append(kept)
        return True

    def started(self) -> None:
        """Close the write end; the command has its own copy now."""
        os.close(self.write_end)
        self.write_end = -1

    def finish(self) -> bytes:
        """Close the pipe and return the output up to now, without later output of background processes."""
        budget = 64
        while budget and self._readable():
            budget -= 1
        self.close()
        return b"".join(self._chunks)

    def close(self) -> None:
        """Close both ends. Has no effect when repeated."""
        if self._read >= 0:
            self._loop.remove_reader(self._read)
            os.close(self._read)
            self._read = -1
        if self.write_end >= 0:
            self.started()


START_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 30.0
_REQUEST_TIMEOUT_S = 30.0
_SEND_TIMEOUT_S = 5.0
_HELPER_EXIT_S = 1.0
"""How long a killed helper may still appear to run."""


@dataclass(frozen=True)
class CommandResult:
    """Result of a command: exit code (128 + signal if one ended it) and output, at most 64 MiB each."""

    code: int
    stdout: bytes
    stderr: bytes

    def tail(self, limit: int) -> str:
        """Return the end of the output, at most `limit` characters in whole lines."""
        return whole_end((self.stdout + self.stderr).decode(errors="replace").strip(), limit)


class RunningSandbox:
    """A running sandbox, created by `await RunningSandbox.start(spec)`."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._loop = asyncio.get_running_loop()
        self._ids = itertools.count()
        self._waiting: dict[int, asyncio.Future[int]] = {}
        self._ready: asyncio.Future[None] = self._loop.create_future()
        self._gone: asyncio.Future[None] = self._loop.create_future()
        self._error = ""
        self._changed: m.Changes | None = None
        self._listening: socket.socket | None = None
        self.notes: list[m.Note] = []
        """Events that the sandbox reported: limits reached, processes killed for grading."""
        self._loop.add_reader(control, self._readable)

    @classmethod
    async def start(cls, spec: m.SandboxSpec, view: m.HostView | None = None) -> "RunningSandbox":
        """Start the sandbox that `spec` describes; SandboxStartError if it does not start.

        Args:
            view: The visible part of the host's root filesystem; None for another root.
        """
        helper = fork_server_client.shared()
        try:
            return await cls._start(helper, spec, view)
        except SandboxStartError:
            if not await asyncio.to_thread(helper.wait_ended, _HELPER_EXIT_S):
                raise
            return await cls._start(fork_server_client.shared(), spec, view)  # the helper had just been killed

    @classmethod
    async def _start(
        cls, helper: fork_server_client.ForkServer, spec: m.SandboxSpec, view: m.HostView | None
    ) -> "RunningSandbox":
        sandbox = cls(helper.start(spec, view))
        try:
            await asyncio.wait_for(sandbox._ready, START_TIMEOUT_S)
        except TimeoutError as error:
            await sandbox.stop()
            raise SandboxStartError(f"the sandbox did not start within {START_TIMEOUT_S:.0f} s") from error
        except BaseException:  # also when cancelled, no process may be left
            await sandbox.stop()
            raise
        return sandbox

    async def run(
        self,
        command: m.Command,
        *,
        stdin: int | None = None,
        stdout: int | None = None,
        seconds: float | None = None,
    ) -> CommandResult:
        """Run a command to its end.

        Args:
            stdin: Descriptor of the standard input: a memfd or a pipe, never a host file.
            stdout: Descriptor of the standard output, instead of the result: a memfd or a pipe.
            seconds: Time limit. Then the process group is killed and TimeoutError is raised.

        Raises:
            SandboxDiedError: The sandbox ended before the command did.
        """
        self._check_alive()
        out, err = Pipe(), Pipe()
        command = replace(command, id=next(self._ids))
        done = self._waiting[command.id] = self._loop.create_future()
        try:
            with open(os.devnull, "rb") as null:  # noqa: ASYNC230, PTH123 (it never blocks)
                fds = [null.fileno() if stdin is None else stdin, out.write_end if stdout is None else stdout]
                await self._send(command, [*fds, err.write_end])
            out.started()
            err.started()
            code = await asyncio.wait_for(done, seconds)
            return CommandResult(code, out.finish(), err.finish())
        except BaseException:  # after a timeout or a cancellation too, the command must not keep running
            if not self._gone.done():
                await asyncio.shield(self._send(m.Kill(command.id), []))
            raise
        finally:
            self._waiting.pop(command.id, None)
            out.close()
            err.close()

    @property
    def ended(self) -> bool:
        """Whether the sandbox has ended, for whatever reason."""
        return self._gone.done()

    async def set_grading(self, *, active: bool, kill: bool = False) -> None:
        """Start grading, for which the sandbox raises its limits, or end it.

        Args:
            active: Whether grading starts.
            kill: Kill the agent's processes in any case, not only if they have exhausted a limit.

        Raises:
            SandboxDiedError: The sandbox has ended.
        """
        await self._request(m.Grading(active, kill, id=next(self._ids)), "did not prepare for grading")

    async def changes(self) -> m.Changes | None:
        """Return the changes since the agent started; None if they are unknown.

        Raises:
            SandboxDiedError: The sandbox has ended.
        """
        self._changed = None
        await self._request(m.ReportChanges(next(self._ids)), "did not list its changes")
        return self._changed

    async def listen(self, port: int) -> socket.socket:
        """Open a socket on `port` of the sandbox's loopback. The caller serves and closes it.

        Raises:
            SandboxError: A process inside uses the port.
            SandboxDiedError: The sandbox has ended.
        """
        await self._request(m.Listen(port, next(self._ids)), "did not open a socket")
        listening, self._listening = self._listening, None
        assert listening is not None
        return listening

    async def _request(self, message: m.Grading | m.ReportChanges | m.Listen, failure: str) -> None:
        self._check_alive()
        done = self._waiting[message.id] = self._loop.create_future()
        try:
            await self._send(message, [])
            await asyncio.wait_for(done, _REQUEST_TIMEOUT_S)
        except TimeoutError as error:
            raise SandboxError(f"the sandbox {failure} within {_REQUEST_TIMEOUT_S:.0f} s") from error
        finally:
            self._waiting.pop(message.id, None)

    async def stop(self) -> None:
        """Stop the sandbox and wait until nothing of it is left."""
        if not self._gone.done():
            self._control.shutdown(socket.SHUT_WR)
            try:
                await asyncio.wait_for(asyncio.shield(self._gone), STOP_TIMEOUT_S)
            except TimeoutError as error:
                raise SandboxError(f"the sandbox did not end within {STOP_TIMEOUT_S:.0f} s") from error
        self._control.close()
        if self._listening is not None:
            self._listening.close()

    async def _send(self, message: m.Message, fds: list[int]) -> None:
        packet = m.encode(message)
        until = self._loop.time() + _SEND_TIMEOUT_S
        while True:
            try:
                m.send_packet(self._control, packet, fds)
            except BlockingIOError as error:
                if self._loop.time() > until:
                    raise SandboxError(f"the sandbox took no request for {_SEND_TIMEOUT_S:.0f} s") from error
                await asyncio.sleep(0.005)
            except OSError as error:
                if not self._gone.done():
                    self._readable()  # the reason may be unread
                self._check_alive()
                raise SandboxDiedError(f"cannot reach the sandbox: {error}") from error
            else:
                return

    def _check_alive(self) -> None:
        if self._gone.done():
            raise SandboxDiedError(self._error or "the sandbox has ended")

    def _readable(self) -> None:
        while True:
            try:
                packet, fds = m.receive(self._control, 1, socket.MSG_CMSG_CLOEXEC)
            except BlockingIOError:
                return
            except OSError:
                packet, fds = b"", []
            if not packet:
                self._on_end()
                return
            self._handle(m.decode(packet), fds)

    def _handle(self, message: m.Message, fds: list[int]) -> None:
        match message:
            case m.Listening():
                self._listening = socket.socket(fileno=fds[0])
            case m.Ready() if not self._ready.done():
                self._ready.set_result(None)
            case m.Note():
                self.notes.append(message)
            case m.Changes():
                self._changed = message
            case m.Failed(error, None):
                self._error = error
            case m.Ended(number, code) if (waiter := self._waiter(number)) is not None:
                waiter.set_result(code)
            case m.Failed(error, int(number)) if (waiter := self._waiter(number)) is not None:
                waiter.set_exception(SandboxError(error))

    def _waiter(self, number: int) -> asyncio.Future[int] | None:
        waiter = self._waiting.get(number)
        return None if waiter is None or waiter.done() else waiter

    def _on_end(self) -> None:
        self._loop.remove_reader(self._control)
        if not self._gone.done():
            self._gone.set_result(None)
        if not self._ready.done():
            self._ready.set_exception(SandboxStartError(self._error or "the sandbox ended while it was starting"))
        for waiter in self._waiting.values():
            if not waiter.done():
                waiter.set_exception(SandboxDiedError(self._error or "the sandbox ended while a command was running"))
