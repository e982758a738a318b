"""Harbor's BaseEnvironment with public names for the private API that our environments need.

`PRIVATE_APIS` lists that API and is checked on import.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import override

from harbor.environments.base import BaseEnvironment, EnvironmentPath, ExecResult

from harbortrainer.harbor_compat import WRITTEN_FOR
from harbortrainer.private_apis import PrivateApi

_BASE = "harbor.environments.base:BaseEnvironment."
PRIVATE_APIS = PrivateApi(
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
PRIVATE_APIS.check()


@dataclass(frozen=True)
class BindMount:
    """A host path that is mounted into the sandbox."""

    source: str
    target: str
    read_only: bool


class OpenEnvironment(BaseEnvironment):
    """Base class of environments, with the trial's mounts, limits, user and variables."""

    def check_definition(self) -> None:
        """Raise for an invalid environment. Harbor's constructor calls it."""

    @override
    def _validate_definition(self) -> None:
        self.check_definition()

    @property
    def bind_mounts(self) -> list[BindMount]:
        """The trial's bind mounts: the user's and Harbor's own."""
        mounts = (mount for mount in self._mounts if mount["type"] == "bind")
        return [BindMount(m["source"], m["target"], bool(m.get("read_only"))) for m in mounts]

    @property
    def writable_targets(self) -> list[str]:
        """Targets of the trial's writable mounts."""
        return self._mount_targets(writable_only=True)

    @property
    def memory_mb(self) -> int | None:
        """The task's memory limit in MB, unless the trial ignores it."""
        return self._resource_value("memory")

    @property
    def cpus(self) -> float | None:
        """The task's CPU limit, unless the trial ignores it."""
        return self._resource_value("cpu")

    @property
    def storage_mb(self) -> int | None:
        """The task's disk limit in MB."""
        return self._effective_storage_mb

    @property
    def network_is_public(self) -> bool:
        """Whether the task has unrestricted network access."""
        return self._network_is_public

    def user_of(self, user: str | int | None) -> str | int | None:
        """Return the user of a command: the given one, or Harbor's user of this phase."""
        return self._resolve_user(user)

    def variables_of(self, env: dict[str, str] | None) -> dict[str, str]:
        """Return the variables of a command: the given ones, merged with the task's and this phase's."""
        return self._merge_env(env) or {}

    async def upload_task_files(self) -> None:
        """Upload the task's environment folder if its image is prebuilt. Call it at the end of `start`."""
        await self._upload_environment_dir_after_start()


async def empty_folders(
    environment: BaseEnvironment, writable: Sequence[EnvironmentPath], others: Sequence[EnvironmentPath]
) -> ExecResult:
    """Empty folders in a sandbox with one command, hence one process; make `writable` world-writable."""
    empty = environment._empty_dirs_command
    command = f"{empty(list(writable), chmod=True)} && {empty(list(others), chmod=False)}"
    return await environment.exec(command, user=environment._reset_dirs_user())
