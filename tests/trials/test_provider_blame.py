"""A provider's failed request is a sandbox error with its words, and a failed stop never fails a trial."""

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import httpx
import pytest
from harbor.environments.base import BaseEnvironment
from harbor.models.environment_type import EnvironmentType

from harbortrainer.sandbox.errors_and_changes import SandboxChanges, SandboxDiedError
from harbortrainer.trials import provider_faults
from harbortrainer.trials.hooks import _Hooks
from harbortrainer.trials.outcome import Outcome, classify
from harbortrainer.trials.provider_faults import UNSTOPPED, SandboxRequestError, exceeded_limit, guard_environment


class FaultySandbox:
    """A sandbox whose requests raise `error`, and whose first `bad_stops` stops raise it or hang."""

    session_id = "a-trial__env"

    def __init__(self, folder: Path, error: Exception, *, bad_stops: int = 0, hangs: bool = False) -> None:
        self.trial_paths = SimpleNamespace(trial_dir=folder / "a-trial")
        self.error, self.bad_stops, self.hangs, self.stops = error, bad_stops, hangs, 0

    def type(self) -> EnvironmentType:
        return EnvironmentType.MODAL

    async def exec(self, command: str, timeout_sec: int | None = None) -> None:
        await asyncio.sleep(timeout_sec or 0)
        raise self.error

    async def download_file(self, source_path: str, target_path: str) -> None:
        raise self.error

    async def stop(self, delete: bool) -> None:
        self.stops += 1
        if self.stops <= self.bad_stops:
            if self.hangs:
                await asyncio.Event().wait()
            raise self.error


def guarded(folder: Path, error: Exception, **faults: Any) -> tuple[BaseEnvironment, FaultySandbox]:
    sandbox = FaultySandbox(folder, error, **faults)
    guard_environment(cast("BaseEnvironment", sandbox))
    return cast("BaseEnvironment", sandbox), sandbox


class RateLimitException(Exception):  # noqa: N818 - as e2b names it
    """A name that is in no table."""


@pytest.mark.parametrize("phase", ["agent_setup", "agent", "verification"])
@pytest.mark.parametrize("error", [httpx.ReadTimeout("read timed out"), RateLimitException("too many"), TimeoutError()])
async def test_providers_error_is_a_sandbox_error(error: Exception, phase, tmp_path: Path):
    sandbox, _ = guarded(tmp_path, error)
    with pytest.raises(SandboxRequestError) as raised:
        await sandbox.exec("true")
    words = ": ".join(filter(None, [type(error).__name__, str(error)]))
    assert str(raised.value) == f"exec failed: {words}"
    assert classify(rewards=None, exception=type(raised.value).__name__, phase=phase) is Outcome.sandbox_error


class TimeoutException(Exception):  # noqa: N818 - as e2b and Novita name it
    """Nothing of Python's own."""


class ExecTimeoutError(Exception):
    """Modal's, which is no TimeoutError of Python's."""


class ConnectError(Exception):
    """E2b's client raises TimeoutException from it."""


def raised_from(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("Command timed out after 0.01 seconds"),
        TimeoutException("the request was cancelled"),
        ExecTimeoutError(),
        TimeoutError(),
        httpx.ReadTimeout(""),
        RuntimeError("command exceeded the requested timeout_sec=1"),
        raised_from(RuntimeError("exec failed"), raised_from(ConnectError(), TimeoutError())),
    ],
)
async def test_command_beyond_its_own_limit_is_the_callers(error: Exception, tmp_path: Path):
    sandbox, _ = guarded(tmp_path, error)
    with pytest.raises(type(error)) as raised:
        await sandbox.exec("sleep 9", timeout_sec=0.01)  # ty: ignore[invalid-argument-type]
    assert raised.value is error


async def test_outage_after_the_limit_is_the_providers(tmp_path: Path):
    sandbox, _ = guarded(tmp_path, httpx.ReadError("connection reset"))
    with pytest.raises(SandboxRequestError, match="connection reset"):
        await sandbox.exec("sleep 9", timeout_sec=0.01)  # ty: ignore[invalid-argument-type]


def test_timeout_before_the_limit_is_the_providers():
    assert not exceeded_limit(ExecTimeoutError(), limit_s=10, elapsed_s=9.9)
    assert not exceeded_limit(ExecTimeoutError(), limit_s=None, elapsed_s=9.9)
    assert not exceeded_limit(SandboxRequestError("exec failed: TimeoutError"), limit_s=10, elapsed_s=10.1)


async def test_missing_file_and_own_errors_keep_their_type(tmp_path: Path):
    sandbox, _ = guarded(tmp_path, FileNotFoundError("/logs/none"))
    with pytest.raises(FileNotFoundError):
        await sandbox.download_file("/logs/none", "none")
    with pytest.raises(SandboxRequestError, match="exec failed: FileNotFoundError"):
        await sandbox.exec("true")  # such as the program that reaches the provider
    sandbox, _ = guarded(tmp_path, SandboxDiedError("out of memory"))
    with pytest.raises(SandboxDiedError):
        await sandbox.exec("true")


async def test_cancelled_request_is_no_fault(tmp_path: Path):
    sandbox, _ = guarded(tmp_path, RuntimeError())
    request = asyncio.create_task(sandbox.exec("sleep 9", timeout_sec=9))
    await asyncio.sleep(0)
    request.cancel()
    with pytest.raises(asyncio.CancelledError):
        await request


@pytest.mark.parametrize("hangs", [False, True])
async def test_failed_stop_is_retried_and_listed(
    hangs: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(provider_faults, "STOP_S", 0.02)
    monkeypatch.setattr(provider_faults, "RETRY_PAUSES_S", (0.05, 0.01))
    sandbox, own = guarded(tmp_path, httpx.ReadTimeout("no answer"), bad_stops=2, hangs=hangs)
    await sandbox.stop(delete=True)
    (entry,) = (tmp_path / UNSTOPPED).iterdir()
    facts = json.loads(entry.read_text())
    assert (facts["sandbox"], facts["environment_type"]) == ("a-trial__env", "modal")
    assert facts["fault"] == ("no answer within 0 s" if hangs else "ReadTimeout: no answer")
    assert "sandbox a-trial__env was not stopped" in caplog.text
    await asyncio.gather(*provider_faults._retries)
    assert own.stops == 3 and not entry.exists()


async def test_sandbox_that_never_stops_stays_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(provider_faults, "RETRY_PAUSES_S", (0.0, 0.0))
    played_again = [guarded(tmp_path, RuntimeError("gone"), bad_stops=9) for _ in range(2)]  # both have one name
    for sandbox, _ in played_again:
        await sandbox.stop(delete=True)
    await asyncio.gather(*provider_faults._retries)
    assert [own.stops for _, own in played_again] == [3, 3] and len(list((tmp_path / UNSTOPPED).iterdir())) == 2


async def test_good_stop_lists_nothing(tmp_path: Path):
    sandbox, own = guarded(tmp_path, RuntimeError())
    await sandbox.stop(delete=True)
    assert own.stops == 1 and not (tmp_path / UNSTOPPED).exists()


async def test_failed_stop_is_retried_if_it_cannot_be_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(provider_faults, "RETRY_PAUSES_S", (0.0, 0.0))
    (tmp_path / UNSTOPPED).touch()  # not even root can write below a file
    sandbox, own = guarded(tmp_path, RuntimeError("gone"), bad_stops=1)
    await sandbox.stop(delete=True)
    await asyncio.gather(*provider_faults._retries)
    assert own.stops == 2 and "not listed: [Errno" in caplog.text


class Watched:
    """A sandbox whose processes that opened the reward cannot be listed."""

    stopped = False

    def reward_openings(self) -> list[str]:
        raise OSError("no such process")

    async def stop(self, delete: bool) -> None:
        self.stopped = delete


async def test_sandbox_stops_if_its_examination_fails():
    sandbox = Watched()
    hooks = _Hooks(SimpleNamespace(agent_environment=sandbox), None, "keep", None)  # ty: ignore[invalid-argument-type]
    hooks.observed.changes.append(SandboxChanges())
    hooks.examine_before_stop()
    with pytest.raises(OSError, match="no such process"):
        await sandbox.stop(delete=True)
    assert sandbox.stopped
