"""The private side of Harbor's environments, under public names."""

from collections.abc import Sequence

from harbor.environments.base import BaseEnvironment, EnvironmentPath, ExecResult


async def empty_folders(
    environment: BaseEnvironment, writable: Sequence[EnvironmentPath], others: Sequence[EnvironmentPath]
) -> ExecResult:
    """Empty folders inside a sandbox in one command, since each costs a process there; `writable` are opened to all."""
    empty = environment._empty_dirs_command
    command = f"{empty(list(writable), chmod=True)} && {empty(list(others), chmod=False)}"
    return await environment.exec(command, user=environment._reset_dirs_user())
