"""CPU of a turn with and without HTTP between the agent and the interception server of the same process.

    python benchmarks/local_calls.py --at 32 --rounds 6

Plays `--at` trials at once at a simulated provider, in this process, alternately with each way, and prints the CPU of
this process for each turn and the median ratio of the pairs. Other work on the machine makes the figures higher.
"""

import argparse
import asyncio
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from scale import config, renderer_config, save_tokenizer, waiting_model, write_task
from verifiers.v1.clients import ModelContext, TrainClientConfig
from verifiers.v1.utils.loaders import load_environment, load_taskset, resolve_env_config

from harbortrainer.environment.verifiers_compat import SamplingConfig
from harbortrainer.trials.local_endpoints import ENDPOINTS
from harbortrainer.trials.record import record_of

_ANSWER_S = 0.3, 0.6


def without_endpoints() -> Callable[[], None]:
    """Make the agents' calls go over HTTP; return the function that ends this."""
    known = dict(ENDPOINTS)
    ENDPOINTS.clear()
    return lambda: ENDPOINTS.update(known)


async def measure(args: argparse.Namespace, url: str, folder: Path) -> None:
    """Play and print."""
    table = config(argparse.Namespace(fault=[], cap=None), folder)
    env, (task,) = load_environment(resolve_env_config(table)), load_taskset(resolve_env_config(table).taskset)
    tokens = str(folder / "tokenizer")
    client = TrainClientConfig(base_url=url, renderer=renderer_config("qwen3"), renderer_model_name=tokens)
    sampling = SamplingConfig(temperature=1.0, max_tokens=512)

    async def play() -> None:
        (slot,) = env.slots(task)
        context = ModelContext(client=client, model="waiting", sampling=sampling)
        episode = await env.run_slot(slot, context, None)
        record = record_of(episode.traces[-1])
        assert record is not None and record.turns == args.turns, "a trial failed"

    async def cpu_ms() -> float:
        began = time.process_time()
        await asyncio.gather(*(play() for _ in range(args.at)))
        return 1000 * (time.process_time() - began) / (args.at * args.turns)

    pairs: list[tuple[float, float]] = []
    async with env.serving():
        await cpu_ms()  # imports and servers come with the first trials
        assert ENDPOINTS, "no server of this process is called without HTTP"
        for _ in range(args.rounds):
            local = await cpu_ms()
            end = without_endpoints()
            pairs.append((local, await cpu_ms()))
            end()
            print(f"without HTTP {pairs[-1][0]:.2f}, with HTTP {pairs[-1][1]:.2f} ms of CPU a turn", flush=True)
    print(f"median ratio {statistics.median(local / http for local, http in pairs):.3f}")


def main() -> None:
    """Read the command line, and measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--at", type=int, default=32, help="trials in flight")
    parser.add_argument("--turns", type=int, default=15, help="answers of a trial, at least 3")
    parser.add_argument("--rounds", type=int, default=6, help="pairs of measurements")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="bench-local-calls-") as name:
        folder = Path(name)
        (folder / "journal").mkdir()
        save_tokenizer(folder / "tokenizer")
        write_task(folder / "tasks" / "write-answer")
        with waiting_model(args.turns, *_ANSWER_S, folder / "tokenizer") as url:
            asyncio.run(measure(args, url, folder))


if __name__ == "__main__":
    main()
