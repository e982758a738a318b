"""Errors of sandboxes, and the files that changed in one while the agent worked.

A sandbox error is an infrastructure failure: it is never attributed to the policy and never trained on.
"""

from dataclasses import dataclass, field
from typing import Literal, Protocol, Self, cast, runtime_checkable

from harbortrainer.sandbox.inside.messages import Changes

type ChangeKind = Literal["added", "changed", "removed"]


@dataclass(frozen=True)
class ChangedFile:
    """A file or link that was added, changed or removed."""

    path: str
    """Cut to 300 characters."""
    how: ChangeKind
    size: int
    """Bytes; 0 for a removed file."""
    before: str | None = None
    """Text before the agent started; None if there was no file or the text is not kept."""
    after: str | None = None
    """Text now; None if there is no file or the text is not kept."""


@dataclass(frozen=True)
class SandboxChanges:
    """Changes in a sandbox since the agent started."""

    files: list[ChangedFile] = field(default_factory=list)
    """The first hundred files."""
    total: int = 0
    """Number of all changed files."""
    tools: list[str] = field(default_factory=list)
    """Descriptions of changes to what a verifier runs with: programs, libraries, modules that Python loads at start."""

    @classmethod
    def from_message(cls, found: Changes) -> Self:
        """Convert the message of `inside.overlay_diff`."""
        columns = found.paths, found.change_types, found.sizes, found.before, found.after
        listed = [
            ChangedFile(path, cast("ChangeKind", how), size, before, after)
            for path, how, size, before, after in zip(*columns, strict=True)
        ]
        return cls(listed, found.total, found.tools)


@runtime_checkable
class ReportsChanges(Protocol):
    """A sandbox that can list changed files."""

    async def changes(self) -> SandboxChanges | None:
        """Return the changes since the agent started; None if they are unknown."""
        ...


@runtime_checkable
class WatchesReward(Protocol):
    """A sandbox that watches who opens the reward while it is graded."""

    def reward_openings(self) -> list[str]:
        """Describe openings of the reward by processes that the agent left running."""
        ...


class SandboxError(RuntimeError):
    """The sandbox itself failed, not a command in it."""


class SandboxStartError(SandboxError):
    """The sandbox did not start; the message names the step and the kernel's error."""


class ImageLacksError(SandboxStartError):
    """The image lacks what every command needs; the message names it. Another attempt would fail the same way."""


class SandboxBuildError(SandboxError):
    """A step of the task's Dockerfile failed; the message names the step and shows the end of its output."""


class SandboxDiedError(SandboxError):
    """The sandbox ended while in use: its init process was killed, usually for memory."""
