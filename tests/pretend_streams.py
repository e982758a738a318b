"""Streams of a simulated GPU, with race detection.

A stream must wait before it reads memory that another stream wrote, or writes memory that another stream read. Here
each operation runs immediately. A real GPU runs it later, so a missing wait gives wrong numbers only sometimes.
"""

import threading
from collections import defaultdict
from collections.abc import Generator, Iterable
from contextlib import contextmanager

import torch


class RaceError(RuntimeError):
    """Two streams use the same memory, at least one writes, and neither waits for the other."""


class Stream:
    """One stream of the GPU."""

    def __init__(self, device: object = None) -> None:
        self.device = torch.device("cuda", 0)
        self.waited: dict[Stream, int] = {}
        """For each other stream: the last of its operations that this stream has waited for."""

    def synchronize(self) -> None:
        STREAMS.synchronize(self)

    def wait_stream(self, other: "Stream") -> None:
        self.waited[other] = STREAMS.now

    def is_capturing(self) -> bool:
        return False


class Streams:
    """The streams of a process, and their last uses of each storage."""

    def __init__(self) -> None:
        self.now = 0
        self._default, self._here, self._lock = Stream(), threading.local(), threading.Lock()
        self.reset()

    def reset(self) -> None:
        self._ended: dict[Stream, int] = {}
        self._written: dict[int, tuple[Stream, int]] = {}
        self._read: dict[int, dict[Stream, int]] = defaultdict(dict)

    @property
    def current(self) -> Stream:
        return getattr(self._here, "stream", self._default)

    @contextmanager
    def on(self, stream: Stream | None) -> Generator[None]:
        before, self._here.stream = self.current, stream or self.current
        try:
            yield
        finally:
            self._here.stream = before

    def synchronize(self, stream: Stream | None = None) -> None:
        """Make the CPU wait for a stream; for all of them if None."""
        with self._lock:
            known = {self._default, *self._ended, *(writer for writer, _ in self._written.values())}
            for ended in known if stream is None else [stream]:
                self._ended[ended] = self.now

    def record(self, name: str, *, read: Iterable[torch.Tensor], written: Iterable[torch.Tensor], fresh: bool) -> None:
        """Record an operation on this thread's stream.

        Args:
            name: The operation's name.
            read, written: Tensors.
            fresh: Whether the written memory is new; a GPU allocates memory per stream.

        Raises:
            RaceError: Another stream may still use the memory.
        """
        with self._lock:
            self.now += 1
            stream = self.current
            for key in map(_key, read):
                self._require_waited(name, stream, [self._written[key]] if key in self._written else [])
                self._read[key][stream] = self.now
            for key in map(_key, written):
                if not fresh:
                    before = [self._written[key]] if key in self._written else []
                    self._require_waited(name, stream, [*before, *self._read[key].items()])
                self._written[key] = stream, self.now
                self._read[key] = {}

    def _require_waited(self, name: str, stream: Stream, uses: Iterable[tuple[Stream, int]]) -> None:
        for other, time in uses:
            if other is not stream and time > max(stream.waited.get(other, 0), self._ended.get(other, 0)):
                raise RaceError(f"{name}: another stream may still use the same memory")


def _key(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


STREAMS = Streams()
