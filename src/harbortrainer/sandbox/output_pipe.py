"""The host's end of a command's standard output or error."""

import asyncio
import os

_CHUNK = 1 << 18


class Pipe:
    """Reads one pipe as it fills; keeps the first `limit` bytes, throws the rest away so that nothing blocks."""

    def __init__(self, limit: int) -> None:
        self._read, self.write_end = os.pipe()
        os.set_blocking(self._read, False)
        self._left = limit
        self._chunks: list[bytes] = []
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._read, self._readable)

    def _readable(self) -> bool:
        """Read once. True as long as there may be more."""
        try:
            chunk = os.read(self._read, _CHUNK)
        except BlockingIOError:
            return False
        if not chunk:
            self._loop.remove_reader(self._read)
            return False
        kept = chunk[: self._left]
        self._left -= len(kept)
        self._chunks.append(kept)
        return True

    def started(self) -> None:
        """The command has its own copy of the writing end: ours closes."""
        os.close(self.write_end)
        self.write_end = -1

    def finish(self) -> bytes:
        """What is in the pipe now belongs to the command; what its background processes write later does not."""
        budget = 64
        while budget and self._readable():
            budget -= 1
        self.close()
        return b"".join(self._chunks)

    def close(self) -> None:
        """Close what is still open. Harmless when nothing is."""
        if self._read >= 0:
            self._loop.remove_reader(self._read)
            os.close(self._read)
            self._read = -1
        if self.write_end >= 0:
            self.started()
