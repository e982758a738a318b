"""A local sandbox that dies while the agent works in it."""

from collections.abc import Sequence

from harbortrainer.sandbox.conversation import Conversation
from harbortrainer.sandbox.local import LocalEnvironment


class DyingEnvironment(LocalEnvironment):
    """Is stopped when the second command is typed, or ended as a subclass says."""

    typed = 0

    async def die(self) -> None:
        await self.stop(delete=True)

    async def converse(
        self, argv: Sequence[str], *, env: dict[str, str] | None = None, user: str | int | None = None
    ) -> Conversation:
        conversation = await super().converse(argv, env=env, user=user)
        ask = conversation.ask

        async def ask_or_die(request: bytes, end: bytes) -> bytes:
            self.typed += b"send-keys" in request
            if self.typed == 2:
                await self.die()
            return await ask(request, end)

        setattr(conversation, "ask", ask_or_die)  # noqa: B010 - of this object alone
        return conversation
