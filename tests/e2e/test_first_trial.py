"""A worker's first trial: what it needs is loaded before the agent's clock starts, and its agent knows the model."""

import time
from pathlib import Path
from typing import Any

import pytest
import renderers.base
from fakes import DONE, keys, make_task
from plugin_runs import config, play, play_one
from scripted_engine import ScriptedEngine, by_turn
from verifiers.v1.clients.train import ElasticRendererPool

from harbortrainer.trials import ModelEndpoint, TrialRecord, TrialSpec, run_trial

pytestmark = pytest.mark.e2e

SOLVES = by_turn([keys("mkdir -p /app && touch /app/answer", duration=0.5), DONE, DONE])
LOADING_S = 12.0
AGENT_S = 10.0


async def test_the_agents_clock_does_not_pay_for_the_tokenizer(
    tmp_path: Path, tokenizer_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_task(tmp_path / "tasks" / "answer", agent_timeout_s=AGENT_S)
    real, loaded = renderers.base.load_tokenizer, []

    def slow(name: str) -> object:
        time.sleep(LOADING_S)  # as a big one on a busy machine
        loaded.append(name)
        return real(name)

    with ScriptedEngine(tokenizer_dir, SOLVES) as engine:
        monkeypatch.setattr(renderers.base, "load_tokenizer", slow)
        monkeypatch.setattr(ElasticRendererPool, "_renderers", {})
        episodes = await play(config(tmp_path / "tasks", tmp_path / "trials"), engine, times=3)
    records = [episode.traces[0].info["harbor"] for episode in episodes]
    assert [record["outcome"] for record in records] == ["completed"] * 3
    assert all(record["timings"]["agent_execution"] < AGENT_S for record in records)
    assert loaded == [str(tokenizer_dir)], "once for all of them"


@pytest.mark.parametrize(
    ("harness", "expected"),
    [({}, 6144), ({"context_limit": 5000}, 5000), ({"capture": "rollout_details"}, 6144)],
)
async def test_the_agent_is_told_how_much_the_model_can_hold(
    tmp_path: Path, tokenizer_dir: Path, monkeypatch: pytest.MonkeyPatch, harness: dict, expected: int
) -> None:
    make_task(tmp_path / "tasks" / "answer")
    told: list[ModelEndpoint | None] = []

    async def noted(spec: TrialSpec, **others: Any) -> TrialRecord:
        told.append(spec.model)
        return await run_trial(spec, **others)

    monkeypatch.setattr("harbortrainer.environment.harness.run_trial", noted)
    with ScriptedEngine(tokenizer_dir, SOLVES, max_model_len=6144) as engine:
        server = {"vllm_base_url": f"{engine.url}/v1"} if "capture" in harness else {}
        trace = await play_one(config(tmp_path / "tasks", tmp_path / "trials", harness=harness | server), engine)
    assert trace.ok, trace.errors
    assert [model.context_limit for model in told if model] == [expected]
