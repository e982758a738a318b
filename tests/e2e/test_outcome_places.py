"""Each way in which a trial can end, on both environment types, through the plugin: it ends as the documents say."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from plugin_runs import config, play_one
from scripted_engine import ScriptedEngine
from server_fates import documented
from troubles import TROUBLES, about, answers
from verifiers.v1.trace import Trace

from harbortrainer.environment.attempts import TrialRetriedError
from harbortrainer.environment.verifiers_side import retries
from harbortrainer.trials.outcome import Outcome

pytestmark = pytest.mark.e2e

ONCE = retries(TrialRetriedError, 0).model_dump()
AT_ONCE = 4
PLAYED_ELSEWHERE = {Outcome.model_error, Outcome.cancelled, Outcome.tampered}
"""Each fault of a server's in test_model_faults, a trial that is cancelled in test_outcomes, and changed tools, which
are looked for in local sandboxes alone, in test_plugin."""


def env_of(name: str, folder: Path, environment_type: str) -> dict[str, Any]:
    """The env table of a run with this one task."""
    trouble = TROUBLES[name]
    about(trouble.task, folder / name, name)
    harness = {"environment_type": environment_type, "n_parallel_envs": AT_ONCE} | trouble.harness
    return config(folder / name, folder / "trials", harness=harness, retries=ONCE, **trouble.agent)


def assert_true_to_its_outcome(name: str, trace: Trace) -> None:
    """It trains with the verifier's reward of what was left, with 0 where it broke its sandbox, or not at all."""
    record = trace.info["harbor"]
    trains = Outcome(record["outcome"]).trains
    assert trace.ok == trains, (name, record)
    assert record["reward"] == ((0.0 if name == "shell-removed" else 1.0) if trains else None), (name, record)
    assert bool(trace.rewards) == trains, name


def test_every_outcome_is_played() -> None:
    assert set(documented("what happened", "local").values()) | PLAYED_ELSEWHERE == set(Outcome)


async def test_each_trial_ends_as_the_documents_say(tmp_path: Path, tokenizer_dir: Path, environment_type: str) -> None:
    envs = {name: env_of(name, tmp_path, environment_type) for name in TROUBLES}
    with ScriptedEngine(tokenizer_dir, answers) as engine:
        traces = await asyncio.gather(*(play_one(env, engine) for env in envs.values()))
    observed = {name: trace.info["harbor"]["outcome"] for name, trace in zip(envs, traces, strict=True)}
    assert observed == documented("what happened", environment_type)
    for name, trace in zip(envs, traces, strict=True):
        assert_true_to_its_outcome(name, trace)
