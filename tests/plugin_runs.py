"""Runs episodes through the real plugin: in this process, or in verifiers' environment server."""

import asyncio
import json
import multiprocessing
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from scripted_engine import ScriptedEngine
from verifiers.v1.clients import EvalClientConfig, ModelContext, TrainClientConfig
from verifiers.v1.episode import Episode
from verifiers.v1.serve import EnvClient, env_config_data, serve_env
from verifiers.v1.trace import Trace
from verifiers.v1.utils.loaders import load_environment, resolve_env_config

from harbortrainer.environment.verifiers_compat import SamplingConfig

SAMPLING = SamplingConfig(temperature=1.0, max_tokens=512)


def salted_sampling(salt: str) -> SamplingConfig:
    """Return the sampling as Prime-RL's orchestrator builds it."""
    return SamplingConfig.model_validate(
        {"temperature": 1.0, "max_tokens": 512, "extra_body": {"top_k": 7, "cache_salt": salt}}
    )


def client(engine: ScriptedEngine) -> TrainClientConfig:
    """Return the client config that a trainer sends: a renderer and a /inference/v1/generate engine."""
    return TrainClientConfig(
        base_url=f"{engine.url}/v1",
        renderer=engine.format,
        renderer_model_name=str(engine.tokenizer_dir),
    )


def config(tasks: Path, trials: Path, *, harness: dict[str, Any] | None = None, **agent: Any) -> dict[str, Any]:
    """Return the `env` table of a run file."""
    own = {"environment_type": "local", "trials_dir": str(trials), "keep_trials": "all", **(harness or {})}
    return {"taskset": {"id": "harbor_env", "tasks_dir": str(tasks)}, "agent": {"harness": own, **agent}}


async def play(
    env: dict[str, Any],
    engine: ScriptedEngine,
    *,
    times: int = 1,
    sampling: SamplingConfig = SAMPLING,
    evaluates: bool = False,
) -> list[Episode]:
    """Run every task `times` times in this process; `evaluates` uses chat completions, as Prime-RL does."""
    environment = load_environment(resolve_env_config(env))
    asks = EvalClientConfig(base_url=f"{engine.url}/v1") if evaluates else client(engine)
    context = ModelContext(client=asks, model=engine.model, sampling=sampling)
    slots = [slot for task in environment.taskset for slot in environment.slots(task, times)]
    async with environment.serving():
        return list(await asyncio.gather(*(environment.run_slot(slot, context) for slot in slots)))


async def play_one(env: dict[str, Any], engine: ScriptedEngine) -> Trace:
    """Run the config's only task and return its trace."""
    (episode,) = await play(env, engine)
    assert not episode.errors or not episode.ok, episode.errors
    (trace,) = episode.traces
    return trace


def most_at_once(trials: Path) -> int:
    """Return the largest number of kept trials that ran concurrently."""
    results = [json.loads(path.read_text()) for path in trials.glob("*/result.json")]
    spans = [(result["started_at"], result["finished_at"]) for result in results]
    return max(sum(start <= moment < end for start, end in spans) for moment, _ in spans)


@asynccontextmanager
async def served(env: dict[str, Any], *, workers: int) -> AsyncGenerator[EnvClient]:
    """Start verifiers' environment server with `workers` worker processes, as a trainer does."""
    spawn = multiprocessing.get_context("spawn")
    addresses, (alive, held) = spawn.Queue(), spawn.Pipe(duplex=False)
    kwargs = {
        "max_workers": workers,
        "elastic": False,
        "address": "tcp://127.0.0.1:0",
        "address_queue": addresses,
        "death_pipe": alive,
        "config_data": env_config_data(resolve_env_config(env)),
    }
    process = spawn.Process(target=serve_env, kwargs=kwargs)
    process.start()
    connection = EnvClient(await asyncio.to_thread(addresses.get, timeout=300))
    try:
        await connection.wait_for_server_startup(timeout=300)
        yield connection
    finally:
        await connection.close()
        held.close()
        process.terminate()
        await asyncio.to_thread(process.join, 30)
