"""Sandboxes that fail, named by import path."""

from harbortrainer.sandbox.errors import SandboxStartError
from harbortrainer.sandbox.local import LocalEnvironment


class WillNotStart(LocalEnvironment):
    """Fails before there is anything to run in."""

    async def start(self, force_build: bool) -> None:
        raise SandboxStartError("no room for another sandbox")
