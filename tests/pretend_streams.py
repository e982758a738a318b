"""Streams of a GPU that is pretended, and who of them wrote what: what one stream writes another may read only once it
has waited for it, and the same the other way round.

Each operation is taken to be computed at once on the stream of its thread. A real GPU would do it some time later, so
that what is missing here shows there as a number that is wrong now and then.
"""

import threading
from collections import defaultdict
from collections.abc import Generator, Iterable
from contextlib import contextmanager

import torch


class RaceError(RuntimeError):
    """Two streams use the same memory, one of them to write, and neither waits for the other."""


class Stream:
    """One queue of a GPU."""

    def __init__(self, device: object = None) -> None:
        self.device = torch.device("cuda", 0)
        self.waited: dict[Stream, int] = {}
        """Up to which operation of another stream it has waited for that."""

    def synchronize(self) -> None:
        STREAMS.synchronize(self)

    def wait_stream(self, other: "Stream") -> None:
        self.waited[other] = STREAMS.now

    def is_capturing(self) -> bool:
        return False


class Streams:
    """The streams of a process, and what they did last with each piece of memory."""

    def __init__(self) -> None:
        self.now = 0
        self._default, self._here, self._lock = Stream(), threading.local(), threading.Lock()
        self.forget()

    def forget(self) -> None:
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
        """The CPU waits, for all of them if none is named."""
        with self._lock:
            known = {self._default, *self._ended, *(writer for writer, _ in self._written.values())}
            for each in known if stream is None else [stream]:
                self._ended[each] = self.now

    def note(self, name: str, *, read: Iterable[torch.Tensor], written: Iterable[torch.Tensor], fresh: bool) -> None:
        """An operation on this thread's stream.

        Args:
            name: Of the operation.
            read, written: Tensors.
            fresh: Whether what is written is new memory, which a GPU gives out stream by stream.

        Raises:
            RaceError: Another stream may not be done with it.
        """
        with self._lock:
            self.now += 1
            stream = self.current
            for key in map(_key, read):
                self._refuse(name, stream, [self._written[key]] if key in self._written else [])
                self._read[key][stream] = self.now
            for key in map(_key, written):
                if not fresh:
                    before = [self._written[key]] if key in self._written else []
                    self._refuse(name, stream, [*before, *self._read[key].items()])
                self._written[key] = stream, self.now
                self._read[key] = {}

    def _refuse(self, name: str, stream: Stream, uses: Iterable[tuple[Stream, int]]) -> None:
        for other, when in uses:
            if other is not stream and when > max(stream.waited.get(other, 0), self._ended.get(other, 0)):
                raise RaceError(f"{name}: another stream may not be done with what this one uses")


def _key(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


STREAMS = Streams()
