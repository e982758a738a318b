"""Requests to a sandbox end at their limit, and soon after a cancellation."""

import asyncio
from typing import cast

import pytest
from harbor.environments.base import BaseEnvironment

from harbortrainer.sandbox.errors_and_changes import SandboxError
from harbortrainer.trials import deadlines


class SilentSandbox:
    """A sandbox that answers no request."""

    async def is_dir(self, path: str) -> bool:
        return await asyncio.Event().wait()

    async def download_dir(self, source_dir: str, target_dir: str) -> None:
        del source_dir, target_dir
        await asyncio.Event().wait()

    async def exec(self, command: str) -> str:
        return command


@pytest.fixture
def sandbox() -> BaseEnvironment:
    silent = cast("BaseEnvironment", SilentSandbox())
    deadlines.set_deadlines(silent)
    return silent


async def test_silent_sandbox_is_a_sandbox_error(sandbox: BaseEnvironment, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(deadlines, "_AFTER_TIMEOUT_S", 0.0)
    limits = deadlines._Deadlines(seconds=0.01)
    limited = limits.limit("is_dir", SilentSandbox().is_dir)
    with pytest.raises(SandboxError, match="did not answer is_dir"):
        await limited("/app")
    assert limits.seconds == 0.0


async def test_cancelled_trial_waits_little(sandbox: BaseEnvironment, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(deadlines, "AFTER_CANCEL_S", 0.01)
    refused: list[str] = []

    async def trial() -> None:
        try:
            await sandbox.is_dir("/app")
        finally:
            for _ in range(3):
                try:
                    await sandbox.download_dir("/logs/agent", "/nowhere")
                except SandboxError as error:
                    refused.append(str(error))

    task = asyncio.create_task(trial())
    await asyncio.sleep(0)
    task.cancel()
    done, _ = await asyncio.wait({task}, timeout=deadlines.REQUEST_S / 10)
    assert done and task.cancelled()
    assert len(refused) == 3


async def test_clean_up_never_raises():
    limits = deadlines._Deadlines(seconds=0.01)
    assert await limits.limit("prepare_logs_for_host", lambda: SilentSandbox().is_dir("/app"))() is None


async def test_commands_have_no_further_limit(sandbox: BaseEnvironment):
    assert await sandbox.exec("true") == "true"
