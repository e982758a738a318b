"""A worker's first trial: the tokenizer loads before the agent's time starts, and the agent gets the context limit."""

import logging
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


async def test_tokenizer_loading_does_not_count_as_agent_time(
    tmp_path: Path, tokenizer_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_task(tmp_path / "tasks" / "answer", agent_timeout_s=AGENT_S)
    load_tokenizer, loaded = renderers.base.load_tokenizer, []

    def load_slowly(name: str) -> object:
        time.sleep(LOADING_S)  # like a large tokenizer on a busy machine
        loaded.append(name)
        return load_tokenizer(name)

    with ScriptedEngine(tokenizer_dir, SOLVES) as engine:
        monkeypatch.setattr(renderers.base, "load_tokenizer", load_slowly)
        monkeypatch.setattr(ElasticRendererPool, "_renderers", {})
        episodes = await play(config(tmp_path / "tasks", tmp_path / "trials"), engine, times=3)
    records = [episode.traces[0].info["harbor"] for episode in episodes]
    assert [record["outcome"] for record in records] == ["completed"] * 3
    assert all(record["timings"]["agent_execution"] < AGENT_S for record in records)
    assert loaded == [str(tokenizer_dir)], "all episodes share one tokenizer"
    kept = [name for name in logging.root.manager.loggerDict for record in records if record["trial_name"] in name]
    assert not kept, "Python keeps loggers, and Harbor names some after each trial"


@pytest.mark.parametrize(
    ("harness", "expected"),
    [({}, 6144), ({"context_limit": 5000}, 5000), ({"capture": "rollout_details"}, 6144)],
)
async def test_agent_gets_context_limit_of_model(
    tmp_path: Path, tokenizer_dir: Path, monkeypatch: pytest.MonkeyPatch, harness: dict, expected: int
) -> None:
    make_task(tmp_path / "tasks" / "answer")
    endpoints: list[ModelEndpoint | None] = []

    async def record_endpoint(spec: TrialSpec, **others: Any) -> TrialRecord:
        endpoints.append(spec.model)
        return await run_trial(spec, **others)

    monkeypatch.setattr("harbortrainer.environment.harness.run_trial", record_endpoint)
    with ScriptedEngine(tokenizer_dir, SOLVES, max_model_len=6144) as engine:
        server = {"vllm_base_url": f"{engine.url}/v1"} if "capture" in harness else {}
        trace = await play_one(config(tmp_path / "tasks", tmp_path / "trials", harness=harness | server), engine)
    assert trace.ok, trace.errors
    assert [model.context_limit for model in endpoints if model] == [expected]
