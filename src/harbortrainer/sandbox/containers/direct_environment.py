"""Harbor's Docker environment on the daemon's API: its Compose commands, and bounded downloads.

Harbor 0.25 repeats a failed download with `docker cp`, which has no limit and copies links. So its downloads are
replaced as a whole: what is refused here is not copied in another way.
"""

from functools import cached_property
from pathlib import Path
from typing import override

from harbor.environments.base import ExecResult

from harbortrainer.harbor_compat.compose_override import ComposeCall, ComposeOverrideDocker
from harbortrainer.sandbox.containers import downloads
from harbortrainer.sandbox.containers.direct_docker import DirectDocker
from harbortrainer.sandbox.containers.shell import MAIN


class DirectDockerEnvironment(ComposeOverrideDocker):
    """Runs what it can through the daemon's API, and the rest through Compose."""

    @cached_property
    def _direct(self) -> DirectDocker:
        return DirectDocker(self)

    @override
    async def run_without_compose(self, call: ComposeCall) -> ExecResult | None:
        return await self._direct.run(call)

    @override
    async def download_file(self, source_path: str, target_path: Path | str) -> None:
        await self.service_download_file(source_path, target_path)

    @override
    async def download_dir(self, source_dir: str, target_dir: Path | str) -> None:
        await self.service_download_dir(source_dir, target_dir)

    @override
    async def service_download_file(
        self, source_path: str, target_path: Path | str, *, service: str | None = None
    ) -> None:
        """Copy a file from a container, without following a link.

        Raises:
            RuntimeError: It is no regular file, or exceeds the task's `storage_mb` or half of the free disk.
            OSError: It cannot be written here.
        """
        target = Path(target_path)
        await self._download(service or MAIN, source_path, target.parent, target.name)

    @override
    async def service_download_dir(
        self, source_dir: str, target_dir: Path | str, *, service: str | None = None
    ) -> None:
        """Copy a folder's content from a container, without devices. Raises as `service_download_file`."""
        await self._download(service or MAIN, f"{source_dir}/.", Path(target_dir), "")

    async def _download(self, service: str, source: str, folder: Path, name: str) -> None:
        container = self._direct.container
        if service == MAIN and container is not None:
            command, env = ["docker", "cp", f"{container.container.id}:{source}", "-"], None
        else:
            command, env = self.compose_command("cp", f"{service}:{source}", "-")
        try:
            limit = downloads.limit_bytes(self.task_env_config.storage_mb, folder)
            await downloads.download(command, env, folder, name, limit)
        except (OSError, RuntimeError) as error:
            self.logger.warning("%s was not copied: %s", source, error)
            raise
