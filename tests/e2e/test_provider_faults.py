"""Trials at a simulated provider whose requests and stops fail: the sandbox is blamed, and a graded trial stays so.

Ended trials are freed at once, also after a failure.
"""

import errno
import fcntl
import gc
import logging
from pathlib import Path
from typing import Any

import pytest
from e2e_environments import HangsOnce
from fakes import DONE, keys, make_task
from plugin_runs import config, play_one
from scripted_engine import ScriptedEngine, by_turn
from verifiers.v1.trace import Trace

from harbortrainer.trials import provider_faults
from harbortrainer.trials.provider_faults import UNSTOPPED
from harbortrainer.trials.sandbox_starts import STARTS, StartGate, read_state

pytestmark = pytest.mark.e2e

SOLVES = by_turn([keys("echo 700 > /app/answer"), DONE, DONE])
SEPARATE = 'artifacts = ["/app/answer"]\n[verifier]\nenvironment_mode = "separate"\n'


async def play_at(provider: str, tmp_path: Path, tokenizer_dir: Path, *, toml: str = "", **kwargs: Any) -> Trace:
    """Play one trial without retries at a class of simulated sandboxes."""
    task = make_task(tmp_path / "tasks" / "answer")
    (task / "task.toml").write_text(
        toml + (task / "task.toml").read_text().replace("[verifier]\n", "" if toml else "[verifier]\n")
    )
    harness = {"environment_type": provider, "environment_kwargs": {"scale": 0.01, **kwargs}}
    env = config(tmp_path / "tasks", tmp_path / "trials", harness=harness, retries={"max_retries": 0})
    with ScriptedEngine(tokenizer_dir, SOLVES) as engine:
        return await play_one(env, engine)


async def test_simulated_sandbox_grades_what_its_agent_wrote(tmp_path: Path, tokenizer_dir: Path) -> None:
    trace = await play_at("simulated_provider:SimulatedSandbox", tmp_path, tokenizer_dir)
    assert (trace.ok, trace.reward, trace.num_turns) == (True, 0.7, 3), trace.errors


@pytest.mark.parametrize("at", ["new-session", "send-keys", "/tests/test.sh"], ids=["setup", "agent", "verification"])
@pytest.mark.parametrize("error", ["ReadTimeout", "RateLimitException"])
async def test_failed_command_is_a_sandbox_error(at: str, error: str, tmp_path: Path, tokenizer_dir: Path) -> None:
    trace = await play_at("e2e_environments:RaisesAt", tmp_path, tokenizer_dir, at=at, error=error)
    record = trace.info["harbor"]
    assert (trace.ok, record["outcome"]) == (False, "sandbox_error")
    assert record["error"] == {"type": "SandboxRequestError", "message": f"exec failed: {error}: the provider is busy"}


async def test_failed_command_of_separate_verifier_is_a_sandbox_error(tmp_path: Path, tokenizer_dir: Path) -> None:
    fault = {"at": "/tests/test.sh", "error": "ReadTimeout"}
    trace = await play_at("e2e_environments:RaisesAt", tmp_path, tokenizer_dir, toml=SEPARATE, **fault)
    assert (trace.ok, trace.info["harbor"]["outcome"]) == (False, "sandbox_error"), trace.info["harbor"]["error"]
    assert trace.info["harbor"]["error"]["message"] == "exec failed: ReadTimeout: the provider is busy"


@pytest.mark.parametrize("fault", ["stop_raises", "stop_hangs"])
async def test_failed_stop_keeps_the_reward(
    fault: str, tmp_path: Path, tokenizer_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(provider_faults, "STOP_S", 0.5)
    trace = await play_at("simulated_provider:SimulatedSandbox", tmp_path, tokenizer_dir, faults={fault: 1.0})
    assert (trace.ok, trace.reward, trace.info["harbor"]["error"]) == (True, 0.7, None), trace.errors
    (entry,) = (tmp_path / "trials" / UNSTOPPED).iterdir()
    assert entry.name.startswith(f"{trace.info['harbor']['trial_name']}__env-")


@pytest.mark.parametrize("case", ["graded", "failed command", "separate verifier"])
async def test_ended_trial_is_freed_without_garbage_collection(case: str, tmp_path: Path, tokenizer_dir: Path) -> None:
    provider, kwargs = "simulated_provider:SimulatedSandbox", {}
    if case == "failed command":
        provider, kwargs = "e2e_environments:RaisesAt", {"at": "send-keys", "error": "ReadTimeout"}
    before = {id(one) for one in gc.get_objects()}
    gc.disable()
    logging.disable(logging.DEBUG)  # pytest keeps each logged stack trace
    try:
        await play_at(provider, tmp_path, tokenizer_dir, toml=SEPARATE if case == "separate verifier" else "", **kwargs)
        kept = {type(one).__name__ for one in gc.get_objects() if id(one) not in before}
    finally:
        gc.enable()
        logging.disable(logging.NOTSET)
    own = {"SingleStepTrial", "SimulatedSandbox", "RaisesAt", "TrainableTerminus2"}
    assert not kept & (own | {"Trace", "MessageNode"} if case == "graded" else own)  # verifiers keeps failed traces


async def test_refused_starts_are_no_attempts(tmp_path: Path, tokenizer_dir: Path) -> None:
    trace = await play_at("e2e_environments:RefusesStarts", tmp_path, tokenizer_dir)
    assert (trace.ok, trace.reward) == (True, 0.7), trace.errors
    assert (trace.metrics["failed_attempts"], trace.metrics["excused_starts"]) == (0, 2)
    assert (trace.metrics["time_start_wait"] or 0) > 0
    assert len([path for path in (tmp_path / "trials").iterdir() if not path.name.startswith(".")]) == 1


@pytest.mark.parametrize("others", ["fail", "start"])
async def test_hanging_start_is_no_attempt_if_others_fail_too(others: str, tmp_path: Path, tokenizer_dir: Path) -> None:
    HangsOnce.hung = False
    gate = StartGate(tmp_path / "trials", "e2e_environments:HangsOnce", None)
    for _ in range(12):
        await (gate.failed(ConnectionError("down"), "") if others == "fail" else gate.succeeded("", of_agent=False))
    toml = "[environment]\nbuild_timeout_sec = 0.5\n[verifier]\n"
    trace = await play_at("e2e_environments:HangsOnce", tmp_path, tokenizer_dir, toml=toml)
    state = read_state(tmp_path / "trials" / STARTS / "e2e_environments-HangsOnce.json")
    assert [good for _, good, _ in state.results][12:] == ([False, True] if others == "fail" else [False])
    assert state.fault.startswith("TimeoutError: Environment start timed out after 0.5 seconds")
    if others == "fail":
        assert (trace.ok, trace.metrics["excused_starts"]) == (True, 1), trace.errors
    else:
        assert (trace.ok, trace.info["harbor"]["outcome"]) == (False, "sandbox_error")


async def test_refused_start_of_separate_verifier_plays_no_second_trial_on_the_trace(
    tmp_path: Path, tokenizer_dir: Path
) -> None:
    trace = await play_at("e2e_environments:RefusesVerifierStarts", tmp_path, tokenizer_dir, toml=SEPARATE)
    record = trace.info["harbor"]
    assert (trace.num_turns, trace.metrics["excused_starts"]) == (3, 0), "the tokens of one trial"
    assert (trace.ok, record["outcome"]) == (False, "sandbox_error"), record["error"]


async def test_file_system_without_locks_is_a_sandbox_error(
    tmp_path: Path, tokenizer_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def flock(file: object, kind: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", flock)
    trace = await play_at("simulated_provider:SimulatedSandbox", tmp_path, tokenizer_dir)
    (error,) = trace.errors
    assert error.message.startswith(f"sandbox_error: {tmp_path / 'trials' / '.starts'}/"), error
    assert "this file system has no file locks; choose an output folder on another one" in error.message
