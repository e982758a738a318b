"""Checks of a started sandbox, the agent's or a separate verifier's: bash, the workdir, and the task's healthcheck.

Harbor runs each command with bash in the task's `workdir`. Without one of them, every command fails, and a trial ends
far from the cause. A failed healthcheck keeps its output.
"""

import asyncio
import shlex
import time
from typing import override

from harbor.environments.base import BaseEnvironment, HealthcheckError
from harbor.models.task.config import HealthcheckConfig

from harbortrainer.sandbox.errors_and_changes import ImageLacksError

BASH = "/bin/bash"
WORKDIR_S, _POLL_S = 10.0, 0.25
"""Seconds in which an ENTRYPOINT may still create the workdir."""
_CHECK_S = 60
_NOT_RUN = (126, 127)
"""Exit codes for a program that cannot be started."""
_SHOWN_CHARS = 500


class StartCheckedEnvironment(BaseEnvironment):
    """An environment whose start ends with `check_start`."""

    async def check_start(self, search_path: str = "") -> None:
        """Check the image of a started sandbox. A task's healthcheck, which runs in the workdir, comes before that.

        Args:
            search_path: The image's PATH, if it is known.

        Raises:
            ImageLacksError: The image lacks bash or the workdir.
        """
        if not await self.has_bash(search_path):
            raise ImageLacksError(
                "the image has no bash, but Harbor runs all commands with it; install bash in the image"
            )
        if self.task_env_config.healthcheck is None:
            await self._await_workdir()

    @override
    async def run_healthcheck(self, healthcheck: HealthcheckConfig | None = None) -> None:
        """Run a step's healthcheck, or the task's, as Harbor does after the start.

        Raises:
            ImageLacksError: The task's failed, and the image lacks the workdir.
            HealthcheckError: The healthcheck failed; the message has its output.
        """
        try:
            await super().run_healthcheck(healthcheck)
        except HealthcheckError as error:
            if healthcheck is None:
                await self._await_workdir()
            config = healthcheck or self.task_env_config.healthcheck
            raise HealthcheckError(f"{error}{await self._output(config)}") from None

    async def has_bash(self, search_path: str) -> bool:
        """Whether commands can be run. `search_path` is the image's PATH, if it is known."""
        return (await self.exec("true", cwd="/", timeout_sec=_CHECK_S)).return_code not in _NOT_RUN

    async def has_folder(self, folder: str) -> bool:
        """Whether commands can be run in a folder."""
        return (await self.exec(f"cd -- {shlex.quote(folder)}", cwd="/", timeout_sec=_CHECK_S)).return_code == 0

    async def _await_workdir(self) -> None:
        folder, until = self.task_env_config.workdir, time.monotonic() + WORKDIR_S
        while folder and not await self.has_folder(folder):
            if time.monotonic() > until:
                raise ImageLacksError(
                    f"the image has no folder {folder}, the workdir in task.toml; create it in the image"
                )
            await asyncio.sleep(_POLL_S)

    async def _output(self, config: HealthcheckConfig | None) -> str:
        """Run a failed healthcheck once more and describe its output, which Harbor does not keep."""
        if config is None:
            return ""
        try:
            done = await self.exec(config.command, timeout_sec=int(config.timeout_sec))
        except RuntimeError as error:
            return f"; run once more, it failed: {error}"
        text = " ".join(f"{done.stdout or ''} {done.stderr or ''}".split())
        return f"; run once more, it ended with code {done.return_code} and printed {text[-_SHOWN_CHARS:] or 'nothing'}"


class FileCheckedEnvironment(StartCheckedEnvironment):
    """The same, for an environment that can look at files without a process."""

    shell = BASH
    """Path of bash inside."""

    @override
    async def has_bash(self, search_path: str) -> bool:
        """Whether bash is at its usual path or on the image's PATH; `shell` is then its path."""
        for path in (BASH, *(f"{folder}/bash" for folder in search_path.split(":") if folder)):
            if await self.is_file(path):
                self.shell = path
                return True
        return False

    @override
    async def has_folder(self, folder: str) -> bool:
        """Whether the folder exists."""
        return await self.is_dir(folder)
