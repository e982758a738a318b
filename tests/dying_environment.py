"""A local sandbox that ends while the agent works in it."""

from collections.abc import Sequence

from harbortrainer.sandbox.interactive_process import InteractiveProcess
from harbortrainer.sandbox.local import LocalEnvironment


class DyingEnvironment(LocalEnvironment):
    """Ends when the agent types its second command; subclasses override `die`."""

    typed = 0

    async def die(self) -> None:
        await self.stop(delete=True)

    async def start_interactive(
        self, argv: Sequence[str], *, env: dict[str, str] | None = None, user: str | int | None = None
    ) -> InteractiveProcess:
        process = await super().start_interactive(argv, env=env, user=user)
        query = process.query

        async def query_or_die(request: bytes, end: bytes) -> bytes:
            self.typed += b"send-keys" in request
            if self.typed == 2:
                await self.die()
            return await query(request, end)

        setattr(process, "query", query_or_die)  # noqa: B010 - of this object alone
        return process
