"""What was changed in a sandbox while the agent worked, where its type can tell."""

from dataclasses import dataclass, field
from typing import Literal, Protocol, runtime_checkable

type How = Literal["added", "changed", "removed"]


@dataclass(frozen=True)
class ChangedFile:
    """A file or a link."""

    path: str
    """At most 300 characters of it."""
    how: How
    size: int
    """Bytes; 0 of one that was removed."""


@dataclass(frozen=True)
class SandboxChanges:
    """What was changed since the agent began."""

    files: list[ChangedFile] = field(default_factory=list)
    """The first hundred."""
    total: int = 0
    """How many files there are."""
    tools: list[str] = field(default_factory=list)
    """Which changes touch what a verifier is run with (programs, libraries, what Python loads by itself), in words."""


@runtime_checkable
class TellsChanges(Protocol):
    """A sandbox that knows what was changed in it."""

    async def changes(self) -> SandboxChanges | None:
        """What was changed since the agent began; None when that cannot be said."""
        ...
