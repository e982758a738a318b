"""Fixtures for real sandboxes, which stop at the end of the test."""

from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from harbor.models.task.config import EnvironmentConfig, NetworkMode, NetworkPolicy
from harbor.models.trial.paths import TrialPaths

from harbortrainer.sandbox.local import LocalEnvironment

type MakeSandbox = Callable[..., Awaitable[LocalEnvironment]]


@pytest.fixture(scope="session")
def layer_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("layers")


@pytest.fixture
async def make_sandbox(tmp_path: Path, layer_cache: Path) -> AsyncIterator[MakeSandbox]:
    """Start a sandbox: `await make_sandbox(dockerfile=..., files={...}, network=..., **kwargs)`."""
    started: list[LocalEnvironment] = []

    async def make(
        *,
        dockerfile: str | None = None,
        files: dict[str, str] | None = None,
        network: NetworkMode = NetworkMode.NO_NETWORK,
        task: dict[str, Any] | None = None,
        start: bool = True,
        image: str = "host",
        network_setting: str = "auto",
        cache_dir: str | None = None,
        **kwargs: Any,
    ) -> LocalEnvironment:
        folder = tmp_path / f"task{len(started)}" / "environment"
        folder.mkdir(parents=True)
        dockerfiles = {"Dockerfile": dockerfile} if dockerfile is not None else {}
        for name, text in (dockerfiles | (files or {})).items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text)
        environment = LocalEnvironment(
            environment_dir=folder,
            environment_name="test",
            session_id="test",
            trial_paths=TrialPaths(trial_dir=tmp_path / f"trial{len(started)}"),
            task_env_config=EnvironmentConfig(**(task or {})),
            network_policy=NetworkPolicy(network_mode=network),
            cache_dir=cache_dir or str(layer_cache),
            image=image,
            network=network_setting,
            **kwargs,
        )
        started.append(environment)
        if start:
            await environment.start(force_build=False)
        return environment

    yield make
    for environment in started:
        await environment.stop(delete=True)


@pytest.fixture
async def sandbox(make_sandbox: MakeSandbox) -> LocalEnvironment:
    """A started sandbox on the host's root filesystem, without a network."""
    return await make_sandbox()
