"""Speed of the embedded sampler, measured on this machine: one short batch of requests, as many as trials at once.

The model is loaded as the run loads it, without an adapter. Each trial gets an equal share of the speed. The time of
its commands is not counted: a timeout that is too short here is too short in the run.
"""

import asyncio
import secrets
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from harbortrainer.config.runfile import RunConfig
from harbortrainer.doctor.finding import Finding, green, red
from harbortrainer.doctor.gpus import config_folders
from harbortrainer.doctor.launch_plan import LaunchPlan
from harbortrainer.doctor.pace import Pace, check_timeouts, turns_of
from harbortrainer.errors import UserError
from harbortrainer.runs.display import loading

PROMPT, COMPLETION = 256, 16
"""Tokens of each request."""
MOST = 128
"""Most requests of the batch."""
TIMEOUT_S = 600.0


def check(plan: LaunchPlan) -> Iterator[Finding]:
    """Measure the tokens per second of the embedded sampler, and compare a trial's time with the agents' timeouts."""
    run = plan.run
    if not isinstance(run, RunConfig) or run.inference.engine == "vllm":
        yield green("pace", "not measured: another sampler than the embedded one")
        return
    name, key = run.starting_model
    folders = config_folders(name) if name else []
    if not folders or find_spec("torch") is None:
        yield green("pace", "not measured: the model's files or torch are missing here")
        return
    trials = trials_at_once(plan, run)
    try:
        speed = tokens_per_second(run, folders[0], min(trials, MOST))
    except UserError as error:
        yield red("pace", f"the sampler does not start: {error.what}", error.do, plan.where(key))
        return
    yield green("pace", f"{name} samples {speed:.3g} tokens/s with {min(trials, MOST)} requests at once")
    for path, harness in plan.harnesses.items():
        source = path.removesuffix(".env.agent.harness")
        turns = turns_of(plan, source)
        tokens = min(turns * answer_tokens(run, source), run.max_model_len)
        pace = Pace(turns, tokens, speed / trials, "this machine", turn_s=0.0)
        yield from check_timeouts(plan, source, pace, harness.timeout_multiplier)


def answer_tokens(run: RunConfig, source: str) -> int:
    """Return the most tokens of an answer in a source, which is named by its dotted key."""
    table = run.orchestrator.train if source.startswith("orchestrator.train.") else run.orchestrator.eval
    assert table is not None
    return table.source[int(source.rpartition("[")[2].rstrip("]"))].sampling.max_completion_tokens or run.max_model_len


def trials_at_once(plan: LaunchPlan, run: RunConfig) -> int:
    """Return the number of trials in flight: the run's limit, at most two batches."""
    batches = 2 * run.orchestrator.batch_size
    return min(plan.parallel or batches, batches)


def tokens_per_second(run: RunConfig, folder: Path, requests: int) -> float:
    """Start the run's sampler on a model folder, and sample one batch of requests.

    Raises:
        UserError: The sampler cannot start.
    """
    completion = min(COMPLETION, run.max_model_len // 2)
    key = secrets.token_urlsafe(32)
    with loading("the model", "transformers"):
        from harbortrainer.engines.local.factories import memory_plan, start_sampler

        sampler = start_sampler(str(folder), run, memory_plan(str(folder), run), api_key=key)
    prompt = [1] * min(PROMPT, run.max_model_len - completion)
    try:
        return requests * completion / asyncio.run(batch_seconds(sampler.url, key, [prompt] * requests, completion))
    finally:
        sampler.stop()


async def batch_seconds(url: str, key: str, prompts: list[list[int]], completion: int) -> float:
    """Send all requests at once; return the seconds until the last reply.

    Args:
        url: The sampler's address.
        key: Its API key.
        prompts: Token ids of each request.
        completion: Tokens to sample for each.
    """
    import httpx

    limits, headers = httpx.Limits(max_connections=len(prompts)), {"Authorization": f"Bearer {key}"}
    bodies = [
        {"token_ids": prompt, "sampling_params": {"max_tokens": completion, "ignore_eos": True}} for prompt in prompts
    ]
    async with httpx.AsyncClient(timeout=TIMEOUT_S, headers=headers, limits=limits, trust_env=False) as client:
        began = time.perf_counter()
        replies = await asyncio.gather(*[client.post(f"{url}/inference/v1/generate", json=body) for body in bodies])
        seconds = time.perf_counter() - began
    for reply in replies:
        reply.raise_for_status()
    return seconds
