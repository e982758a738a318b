"""Trials through the plugin get the outcomes that docs/outcomes.md lists, on both environment types."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from documented_outcomes import documented
from plugin_runs import config, play_one
from scripted_engine import ScriptedEngine
from troubles import TROUBLES, about, answers
from verifiers.v1.trace import Trace

from harbortrainer.environment.rollout_state import TrialRetriedError
from harbortrainer.environment.verifiers_compat import retries
from harbortrainer.trials.outcome import Outcome

pytestmark = pytest.mark.e2e

ONCE = retries(TrialRetriedError, 0).model_dump()
N_PARALLEL = 4
TESTED_ELSEWHERE = {Outcome.model_error, Outcome.cancelled, Outcome.tampered}
"""Outcomes that other files test: `model_error` in test_model_faults, `cancelled` in test_outcomes, `tampered` in
test_plugin. Only local sandboxes detect changed tools."""


def env_of(name: str, folder: Path, environment_type: str) -> dict[str, Any]:
    """Write the task with this fault and return the env table of a run with only this task."""
    trouble = TROUBLES[name]
    about(trouble.task, folder / name, name)
    harness = {"environment_type": environment_type, "n_parallel_envs": N_PARALLEL} | trouble.harness
    return config(folder / name, folder / "trials", harness=harness, retries=ONCE, **trouble.agent)


def assert_reward_matches_outcome(name: str, trace: Trace) -> None:
    """Check the reward: the verifier's if the outcome is trained on, 0 if the agent broke its sandbox, else None."""
    record = trace.info["harbor"]
    trains = Outcome(record["outcome"]).trains
    assert trace.ok == trains, (name, record)
    assert record["reward"] == ((0.0 if name == "shell-removed" else 1.0) if trains else None), (name, record)
    assert bool(trace.rewards) == trains, name


def test_every_outcome_has_a_test() -> None:
    assert set(documented("what happened", "local").values()) | TESTED_ELSEWHERE == set(Outcome)


async def test_outcome_and_reward_of_each_fault_are_as_documented(
    tmp_path: Path, tokenizer_dir: Path, environment_type: str
) -> None:
    envs = {name: env_of(name, tmp_path, environment_type) for name in TROUBLES}
    with ScriptedEngine(tokenizer_dir, answers) as engine:
        traces = await asyncio.gather(*(play_one(env, engine) for env in envs.values()))
    observed = {name: trace.info["harbor"]["outcome"] for name, trace in zip(envs, traces, strict=True)}
    assert observed == documented("what happened", environment_type)
    for name, trace in zip(envs, traces, strict=True):
        assert_reward_matches_outcome(name, trace)
