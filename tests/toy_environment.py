"""A third-party environment type: its class and its registry entry."""

from typing import ClassVar, override

from harbortrainer.config.environment_table import EnvironmentEntry
from harbortrainer.sandbox.local import LocalEnvironment


class ToyEnvironment(LocalEnvironment):
    """A local sandbox under another type name; records the names of its tasks."""

    played: ClassVar[list[str]] = []

    @staticmethod
    @override
    def type() -> str:
        return "toy"

    @override
    async def start(self, force_build: bool) -> None:
        await super().start(force_build)
        self.played.append(self.environment_name)


TOY = EnvironmentEntry(
    "toy_environment:ToyEnvironment",
    needs_namespaces=True,
    builds_images=True,
    shares_ports=True,
    examinable=True,
    reports_changes=True,
)
