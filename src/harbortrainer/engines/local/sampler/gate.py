"""Who may be in the engine: lets requests in, and can be shut behind those that are in.

Contract: a hold keeps new requests waiting; `shut` returns when the last one inside has left. Several holds may be on
at once (a pause and a hand-over); requests enter when the last is lifted. For one event loop, not for threads.
"""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager


class Gate:
    """Counts who is inside and who waits."""

    def __init__(self) -> None:
        self.inside = 0
        self.waiting = 0
        self._holds: set[str] = set()
        self._changed = asyncio.Condition()

    @asynccontextmanager
    async def enter(self) -> AsyncGenerator[None]:
        """Waits until no hold is on; inside until the block ends."""
        async with self._changed:
            self.waiting += 1
            try:
                await self._changed.wait_for(lambda: not self._holds)
            finally:
                self.waiting -= 1
            self.inside += 1
        try:
            yield
        finally:
            # No lock and no await: a cancelled request must leave too.
            self.inside -= 1
            if not self.inside:
                _ = asyncio.ensure_future(self._notify())  # noqa: RUF006 (nothing to do with its result)

    async def shut(self, hold: str) -> None:
        """Puts `hold` on and waits until nobody is inside. Idempotent."""
        self._holds.add(hold)
        async with self._changed:
            await self._changed.wait_for(lambda: not self.inside)

    async def lift(self, hold: str) -> None:
        """Takes `hold` off. Idempotent."""
        self._holds.discard(hold)
        await self._notify()

    def held(self, hold: str) -> bool:
        return hold in self._holds

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()
