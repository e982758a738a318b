"""Harbor's BaseEnvironment, with public names for what an environment of ours needs of its private side.

`COUPLINGS` lists what is touched, and is checked before the first use.
"""

from dataclasses import dataclass
from typing import override

from harbor.environments.base import BaseEnvironment

from harbortrainer.couplings import Couplings
from harbortrainer.harbor_side import WRITTEN_FOR

_BASE = "harbor.environments.base:BaseEnvironment."
COUPLINGS = Couplings(
    "harbor",
    WRITTEN_FOR,
    __name__,
    (
        f"{_BASE}_validate_definition()",
        f"{_BASE}_mounts",
        f"{_BASE}_mount_targets(writable_only)",
        f"{_BASE}_resource_value(resource)",
        f"{_BASE}_effective_storage_mb",
        f"{_BASE}_resolve_user(user)",
        f"{_BASE}_merge_env(env)",
        f"{_BASE}_network_is_public",
        f"{_BASE}_upload_environment_dir_after_start()",
    ),
)
COUPLINGS.check()


@dataclass(frozen=True)
class BindMount:
    """A path of the host's that is to be seen inside."""

    source: str
    target: str
    read_only: bool


class OpenEnvironment(BaseEnvironment):
    """What Harbor asks of an environment, and what it knows about the trial's."""

    def check_definition(self) -> None:
        """Called by Harbor's constructor. Raises for an environment that cannot be."""

    @override
    def _validate_definition(self) -> None:
        self.check_definition()

    @property
    def bind_mounts(self) -> list[BindMount]:
        """What the trial mounts: what the user asked for, and Harbor's own folders."""
        mounts = (mount for mount in self._mounts if mount["type"] == "bind")
        return [BindMount(m["source"], m["target"], bool(m.get("read_only"))) for m in mounts]

    @property
    def writable_targets(self) -> list[str]:
        """Where what the trial mounts for writing is to be, inside."""
        return self._mount_targets(writable_only=True)

    @property
    def memory_mb(self) -> int | None:
        """The task's limit, unless the trial is to ignore it."""
        return self._resource_value("memory")

    @property
    def cpus(self) -> float | None:
        """The task's limit, unless the trial is to ignore it."""
        return self._resource_value("cpu")

    @property
    def storage_mb(self) -> int | None:
        """The task's limit."""
        return self._effective_storage_mb

    @property
    def network_is_public(self) -> bool:
        """Whether the task may reach everything."""
        return self._network_is_public

    def user_of(self, user: str | int | None) -> str | int | None:
        """Who runs a command: the given user, or the one that Harbor has set for this phase."""
        return self._resolve_user(user)

    def variables_of(self, env: dict[str, str] | None) -> dict[str, str]:
        """The variables of a command: the given ones, with those of the task and of this phase."""
        return self._merge_env(env) or {}

    async def upload_task_files(self) -> None:
        """Upload the task's folder where its image is a prebuilt one. The last thing of `start`."""
        await self._upload_environment_dir_after_start()
