"""Harbor's `docker` with a compose file of ours laid over all of Harbor's, and with commands that Compose is not asked.

Whatever Harbor's environment wants of Compose goes through one method; a subclass may do it in another way. Everything
above that method (users, variables, folders, healthchecks, network policies) stays Harbor's.

`COUPLINGS` lists what is touched, and is checked before the first use.
"""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import override

from harbor.environments.base import ExecResult, OutputCallback
from harbor.environments.docker.docker import DockerEnvironment

from harbortrainer.couplings import Couplings
from harbortrainer.harbor_side import WRITTEN_FOR

_DOCKER = "harbor.environments.docker.docker:DockerEnvironment."
COUPLINGS = Couplings(
    "harbor",
    WRITTEN_FOR,
    __name__,
    (
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
COUPLINGS.check()

from harbor.environments.docker.docker import _sanitize_docker_compose_project_name as project_name  # noqa: E402

_STATIC_FILES = (DockerEnvironment._DOCKER_COMPOSE_BUILD_PATH, DockerEnvironment._DOCKER_COMPOSE_PREBUILT_PATH)
_modes_that_fit: set[bool] = set()
_images_that_fit: set[str] = set()


@dataclass(frozen=True)
class Asked:
    """What Harbor wants of Compose: the words after its options, what they read, and how long it may take."""

    words: list[str]
    stdin: bytes | None = None
    seconds: int | None = None
    on_output: OutputCallback | None = None


class OverlaidDocker(DockerEnvironment):
    """Harbor's `docker`; Compose reads `overlay_file` last, and is asked only what `instead_of_compose` leaves."""

    @abstractmethod
    def overlay_file(self, others: Sequence[Path]) -> Path:
        """The compose file, which exists; `others` are those that Compose reads before it."""

    @abstractmethod
    async def instead_of_compose(self, asked: Asked) -> ExecResult | None:
        """Do what Compose is asked for; None leaves it to Compose."""

    async def compose(self, *words: str) -> ExecResult:
        """Ask Compose itself.

        Raises:
            RuntimeError: It failed; the message holds what it said.
        """
        return await super()._run_docker_compose_command(list(words))

    @property
    def project(self) -> str:
        """The name of the compose project."""
        return project_name(self.session_id)

    @property
    def image(self) -> str:
        """The image of the main service: the task's prebuilt one, or the one that is built of its folder."""
        return (self.task_env_config.docker_image if self._use_prebuilt else None) or self._main_image_name

    @property
    def builds(self) -> bool:
        """Whether the image is built of the task's folder."""
        return not self._use_prebuilt

    def generated_files(self) -> list[Path] | None:
        """The compose files that say what the main service is, ours last; None when the task or the user brings more.

        Beside them there is what Harbor says of every service: it is built, or has an image, and sleeps.
        """
        if self._uses_compose or self._is_windows_container:
            return None
        return [path for path in self._docker_compose_paths if path not in _STATIC_FILES]

    def knows_rootless(self, rootless: bool) -> None:
        """Say whether the daemon runs without root; Harbor asks the daemon otherwise."""
        self._rootless_docker = rootless

    @property
    @override
    def _docker_compose_paths(self) -> list[Path]:
        others = super()._docker_compose_paths
        return [*others, self.overlay_file(others)]

    @override
    async def _run_docker_compose_command(
        self,
        command: list[str],
        check: bool = True,
        timeout_sec: int | None = None,
        stdin_data: bytes | None = None,
        on_output: OutputCallback | None = None,
    ) -> ExecResult:
        done = await self.instead_of_compose(Asked(command, stdin_data, timeout_sec, on_output))
        if done is None:
            return await super()._run_docker_compose_command(command, check, timeout_sec, stdin_data, on_output)
        if check and done.return_code != 0:
            asked = " ".join(command)[:500]
            raise RuntimeError(f"{self.environment_name}: docker {asked} (code {done.return_code}): {done.stdout}")
        return done

    @override
    def _validate_daemon_mode(self) -> None:
        """Once in a process: it starts a program and waits for it, the event loop too."""
        if self._is_windows_container not in _modes_that_fit:
            super()._validate_daemon_mode()
            _modes_that_fit.add(self._is_windows_container)

    @override
    async def _validate_image_os(self, image_name: str) -> None:
        if image_name not in _images_that_fit:
            await super()._validate_image_os(image_name)
            _images_that_fit.add(image_name)
