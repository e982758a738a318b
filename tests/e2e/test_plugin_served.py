"""The plugin in verifiers' environment server with several workers, and in verifiers' eval command."""

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from fakes import DONE, keys, make_task
from plugin_runs import SAMPLING, client, config, most_at_once, salted_sampling, served
from scripted_engine import ScriptedEngine, by_turn
from verifiers.v1.clients import EvalClientConfig
from verifiers.v1.utils.loaders import load_taskset, resolve_env_config

pytestmark = pytest.mark.e2e

SOLVES = by_turn([keys("mkdir -p /app && touch /app/answer", duration=1.0), DONE, DONE])


@pytest.mark.long
async def test_two_workers_share_cap_on_parallel_trials(tmp_path: Path, tokenizer_dir: Path) -> None:
    for name in ("one", "two"):
        make_task(tmp_path / "tasks" / name, extra=f"# {name}")
    env = config(tmp_path / "tasks", tmp_path / "trials", harness={"n_parallel_envs": 3})
    tasks = list(load_taskset(resolve_env_config(env).taskset)) * 4
    with ScriptedEngine(tokenizer_dir, SOLVES) as engine:
        async with served(env, workers=2) as server:
            requests = [
                server.run(client(engine), engine.model, SAMPLING, task.data.model_dump(mode="json")) for task in tasks
            ]
            episodes = await asyncio.gather(*requests)
    traces = [episode.traces[0] for episode in episodes]
    assert [(trace.ok, trace.reward) for trace in traces] == [(True, 1.0)] * 8
    assert [trace.info["harbor"]["task_key"] for trace in traces] == [task.key for task in tasks]
    samples = {trace.id: [s for s in engine.samples if s.session == trace.id] for trace in traces}
    for trace in traces:
        (branch,) = trace.branches
        sampled = [i for i, is_sampled in enumerate(branch.sampled_mask) if is_sampled]
        assert [branch.token_ids[i] for i in sampled] == [t for s in samples[trace.id] for t in s.token_ids]
        assert [branch.logprobs[i] for i in sampled] == [p for s in samples[trace.id] for p in s.logprobs]
    assert most_at_once(tmp_path / "trials") <= 3


@pytest.mark.long
async def test_cache_salt_is_at_top_level_of_request(tmp_path: Path, tokenizer_dir: Path) -> None:
    make_task(tmp_path / "tasks" / "answer")
    env = config(tmp_path / "tasks", tmp_path / "trials")
    (task,) = load_taskset(resolve_env_config(env).taskset)
    data = task.data.model_dump(mode="json")
    with ScriptedEngine(tokenizer_dir, SOLVES) as engine:
        eval_client = EvalClientConfig(base_url=f"{engine.url}/v1")
        async with served(env, workers=1) as server:
            trained = await server.run(client(engine), engine.model, salted_sampling("3"), data)
            n_training = len(engine.requests)
            evaluated = await server.run(eval_client, engine.model, salted_sampling("4"), data)
    assert trained.ok and evaluated.ok, [episode.traces[0].errors for episode in (trained, evaluated)]
    training, evaluation = engine.requests[:n_training], engine.requests[n_training:]
    assert [body["cache_salt"] for body in training] == ["3"] * 3
    assert all("cache_salt" not in body["sampling_params"] for body in training)
    assert all(body["sampling_params"]["top_k"] == 7 for body in training)
    assert [(body["cache_salt"], body["top_k"]) for body in evaluation] == [("4", 7)] * 3
    assert all("extra_body" not in body for body in evaluation)


@pytest.mark.long
def test_verifiers_eval_command_runs_tasks(tmp_path: Path, tokenizer_dir: Path) -> None:
    make_task(tmp_path / "tasks" / "answer")
    with ScriptedEngine(tokenizer_dir, SOLVES) as engine:
        command = [
            *[sys.executable, "-c", "from verifiers.v1.cli.eval.main import main; main()", "harbor_env"],
            *["--env.taskset.tasks-dir", str(tmp_path / "tasks")],
            *["--env.agent.harness.environment-type", "local"],
            *["--env.agent.harness.trials-dir", str(tmp_path / "trials")],
            *["--model", engine.model, "--client.type", "train", "--client.base-url", f"{engine.url}/v1"],
            *["--client.renderer.name", "default", "--client.renderer-model-name", str(tokenizer_dir)],
            *["--num-rollouts", "2", "--no-rich", "--no-push", "--output-dir", str(tmp_path / "outputs")],
        ]
        done = subprocess.run(command, capture_output=True, text=True, timeout=400, cwd=tmp_path, env=_environment())
    assert done.returncode == 0, done.stderr[-3000:]
    (results,) = (tmp_path / "outputs").glob("*/traces.jsonl")
    traces = [json.loads(line) for line in results.read_text().splitlines()]
    records = [trace["info"]["harbor"] for trace in _traces(traces)]
    assert [(record["outcome"], record["reward"]) for record in records] == [("completed", 1.0)] * 2


def _traces(lines: list[dict]) -> list[dict]:
    """Return the traces in verifiers' output, which has one trace or one episode per line."""
    return [trace for line in lines for trace in line.get("traces", [line])]


def _environment() -> dict[str, str]:
    return {**os.environ, "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
