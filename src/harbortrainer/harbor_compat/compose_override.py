"""Harbor's `docker` environment with an additional compose file, and with Compose commands that a subclass can replace.

Harbor's environment runs every Compose command through one method, which this class overrides. Users, variables,
folders, healthchecks and network policies remain Harbor's. `PRIVATE_APIS` lists the private API in use and is checked
on import.
"""

from abc import abstractmethod
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import override

from harbor.environments.base import ExecResult, OutputCallback
from harbor.environments.docker.docker import DockerEnvironment
from harbor.environments.docker.docker import _sanitize_docker_compose_project_name as project_name

from harbortrainer.harbor_compat import WRITTEN_FOR
from harbortrainer.private_apis import PrivateApi

_DOCKER = "harbor.environments.docker.docker:DockerEnvironment."
PRIVATE_APIS = PrivateApi(
    "harbor",
    WRITTEN_FOR,
    __name__,
    (
        f"{_DOCKER}_compose_env_vars(include_os_env)",
        f"{_DOCKER}_compose_infra_env_vars()",
        f"{_DOCKER}_docker_compose_paths",
        f"{_DOCKER}_run_docker_compose_command(command, check, timeout_sec, stdin_data, on_output)",
        f"{_DOCKER}_use_prebuilt",
        f"{_DOCKER}_main_image_name",
        f"{_DOCKER}_rootless_docker",
        f"{_DOCKER}_validate_daemon_mode()",
        f"{_DOCKER}_validate_image_os(image_name)",
        "harbor.environments.docker.docker:_sanitize_docker_compose_project_name(name)",
    ),
)
PRIVATE_APIS.check()


_STATIC_FILES = (DockerEnvironment._DOCKER_COMPOSE_BUILD_PATH, DockerEnvironment._DOCKER_COMPOSE_PREBUILT_PATH)
_checked_modes: set[bool] = set()
_checked_images: set[str] = set()


@dataclass(frozen=True)
class ComposeCall:
    """A Compose command of Harbor's: arguments after the global options, standard input and time limit."""

    words: list[str]
    stdin: bytes | None = None
    seconds: int | None = None
    on_output: OutputCallback | None = None


class ComposeOverrideDocker(DockerEnvironment):
    """Harbor's `docker`; Compose reads `override_file` last and runs only what `run_without_compose` leaves to it."""

    @abstractmethod
    def override_file(self, others: Sequence[Path]) -> Path:
        """Write the override file and return its path; Compose reads `others` before it."""

    @abstractmethod
    async def run_without_compose(self, call: ComposeCall) -> ExecResult | None:
        """Run a Compose command in another way; return None to leave it to Compose."""

    @abstractmethod
    def compose_environment(self, env: dict[str, str], infra: Collection[str]) -> dict[str, str]:
        """Return the environment of Compose commands.

        Args:
            env: Harbor's: this process's variables, then the task's, then Harbor's own.
            infra: Names of Harbor's own variables.
        """

    async def compose(self, *words: str) -> ExecResult:
        """Run a command with Compose.

        Raises:
            RuntimeError: It failed; the message holds its output.
        """
        return await super()._run_docker_compose_command(list(words))

    def compose_command(self, *words: str) -> tuple[list[str], dict[str, str]]:
        """Return the command line of a Compose command, and its environment."""
        files = [word for path in self._docker_compose_paths for word in ("-f", str(path.resolve().absolute()))]
        folder = str(self.environment_dir.resolve().absolute())
        options = ["--project-name", self.project, "--project-directory", folder]
        return ["docker", "compose", *options, *files, *words], self._compose_env_vars(include_os_env=True)

    @property
    def project(self) -> str:
        """Name of the compose project."""
        return project_name(self.session_id)

    @property
    def image(self) -> str:
        """Image of the main service: the task's prebuilt image, or the one built from its folder."""
        return (self.task_env_config.docker_image if self._use_prebuilt else None) or self._main_image_name

    @property
    def builds_image(self) -> bool:
        """Whether the image is built from the task's folder."""
        return not self._use_prebuilt

    def generated_compose_files(self) -> list[Path] | None:
        """Return the generated compose files of the main service, the override last.

        Harbor's static files, which only add the image or build and a command that sleeps, are left out.

        Returns:
            The files; None if the task or the user has compose files of their own.
        """
        if self._uses_compose or self._is_windows_container:
            return None
        return [path for path in self._docker_compose_paths if path not in _STATIC_FILES]

    def set_rootless(self, rootless: bool) -> None:
        """Set whether the daemon is rootless, so that Harbor does not query it."""
        self._rootless_docker = rootless

    @property
    @override
    def _docker_compose_paths(self) -> list[Path]:
        others = super()._docker_compose_paths
        return [*others, self.override_file(others)]

    @override
    def _compose_env_vars(self, include_os_env: bool = True) -> dict[str, str]:
        return self.compose_environment(super()._compose_env_vars(include_os_env), self._compose_infra_env_vars())

    @override
    async def _run_docker_compose_command(
        self,
        command: list[str],
        check: bool = True,
        timeout_sec: int | None = None,
        stdin_data: bytes | None = None,
        on_output: OutputCallback | None = None,
    ) -> ExecResult:
        done = await self.run_without_compose(ComposeCall(command, stdin_data, timeout_sec, on_output))
        if done is None:
            return await super()._run_docker_compose_command(command, check, timeout_sec, stdin_data, on_output)
        if check and done.return_code != 0:
            shown = " ".join(command)[:500]
            raise RuntimeError(f"{self.environment_name}: docker {shown} (code {done.return_code}): {done.stdout}")
        return done

    @override
    def _validate_daemon_mode(self) -> None:
        """Check once per process: Harbor's check starts a program and blocks the event loop."""
        if self._is_windows_container not in _checked_modes:
            super()._validate_daemon_mode()
            _checked_modes.add(self._is_windows_container)

    @override
    async def _validate_image_os(self, image_name: str) -> None:
        if image_name not in _checked_images:
            await super()._validate_image_os(image_name)
            _checked_images.add(image_name)
