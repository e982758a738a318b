"""Run hundreds of trials at once at a simulated provider, and print what each one costs and how many are lost.

    python benchmarks/scale.py                                  32 and 128 in flight, two workers
    python benchmarks/scale.py --at 512 1000 --workers 4 --waves 2
    python benchmarks/scale.py --at 64 --fault start_fails=0.6 --fault-seconds 120

The environment server and its workers are a run's own, with TrainableTerminus2, a train client and token ids; only the
sandboxes and the model wait instead of working. The columns:

- overhead: a trial's wall, from its sandbox's making to its stop, over the seconds that sandbox and model waited
- trials a minute, and those of trials that only wait
- CPU seconds of the server and its workers (and of this benchmark: model, client), memory and descriptors, for each
  trial; memory and descriptors over idle
- the longest stall of a worker's event loop
- lost: trials without a reward, of all; wrong: trials with another reward than their own

Walls and stalls are meaningful on a quiet machine only; CPU, memory and descriptors on any. The exit code is 1 if a
reward is wrong, or if a trial is lost without a fault.
"""

import argparse
import asyncio
import json
import os
import resource
import statistics
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")

import psutil
from meters import tree_memory
from rich.console import Console
from rich.table import Table
from scripted_model import renderer_config, save_tokenizer
from trials import write_task
from verifiers.v1.clients import TrainClientConfig
from verifiers.v1.episode import WireEpisode
from verifiers.v1.serve import EnvClient
from verifiers.v1.utils.loaders import load_taskset, resolve_env_config
from waiting_model import SEED_CHARS, answer_of, seconds_of, waiting_model

from harbortrainer.engines.env_server import STARTUP_S, EnvServer
from harbortrainer.environment.episode_end import episode_outcome
from harbortrainer.environment.verifiers_compat import SamplingConfig
from harbortrainer.trials.record import record_of

_HERE = Path(__file__).resolve().parent
_SAMPLE_S = 2.0


@dataclass
class Played:
    """The trials of one measurement."""

    episodes: list[WireEpisode] = field(default_factory=list)
    unanswered: int = 0
    wall_s: float = 0.0
    cpu_s: float = 0.0
    own_cpu_s: float = 0.0
    """CPU seconds of the benchmark itself: the model server, and this process, which receives the episodes."""
    memory_mb: float = 0.0
    """Largest memory over idle."""
    files: int = 0
    """Largest number of descriptors over idle, summed over the workers."""


@dataclass(frozen=True)
class Verdict:
    """Rewards and waits of the played trials."""

    outcomes: Counter[str]
    wrong: int
    overheads: list[float]
    asked_s: list[float]
    stall_s: float


def config(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Return the `env` table."""
    harness = {
        "environment_type": "simulated_provider:SimulatedSandbox",
        "environment_kwargs": {"journal": str(folder / "journal"), "faults": dict(args.fault)},
        "trials_dir": str(folder / "trials"),
        "n_parallel_envs": args.cap,
    }
    return {"taskset": {"id": "harbor_env", "tasks_dir": str(folder / "tasks")}, "agent": {"harness": harness}}


async def play(
    args: argparse.Namespace, at: int, env: dict[str, Any], server: EnvServer, client: TrainClientConfig
) -> Played:
    """Play `at` trials at once, `args.waves` times."""
    assert server.process is not None
    journal = Path(env["agent"]["harness"]["environment_kwargs"]["journal"])
    connection, played = EnvClient(await asyncio.to_thread(server.address)), Played()
    await connection.wait_for_server_startup(timeout=STARTUP_S)
    (task,) = load_taskset(resolve_env_config(env).taskset)
    data = task.data.model_dump(mode="json")
    sampling = SamplingConfig(temperature=1.0, max_tokens=512)

    async def lane(waves: int) -> None:
        for _ in range(waves):
            try:
                async with asyncio.timeout(args.patience):
                    played.episodes.append(await connection.run(client, "waiting", sampling, data))
            except (TimeoutError, RuntimeError):
                played.unanswered += 1

    workers = [psutil.Process(server.process.pid), *psutil.Process(server.process.pid).children(recursive=True)]
    own = [child for child in psutil.Process().children(recursive=True) if child not in workers] + [psutil.Process()]
    await asyncio.gather(*(lane(1) for _ in range(args.workers)))  # imports of each worker come with its first trial
    played = Played()
    meter = asyncio.create_task(_meter(workers, played))
    await asyncio.sleep(_SAMPLE_S)
    faults = journal / "faults"
    faults.touch()
    ended = asyncio.get_running_loop().call_later(args.fault_seconds, faults.unlink)
    cpu, own_cpu, began = _cpu(workers), _cpu(own), time.monotonic()
    await asyncio.gather(*(lane(args.waves) for _ in range(at)))
    played.wall_s, played.cpu_s, played.own_cpu_s = time.monotonic() - began, _cpu(workers) - cpu, _cpu(own) - own_cpu
    meter.cancel()
    ended.cancel()
    await connection.close()
    return played


def _cpu(processes: list[psutil.Process]) -> float:
    return sum(sum(process.cpu_times()[:2]) for process in processes)


async def _meter(workers: list[psutil.Process], played: Played) -> None:
    idle_mb, idle_files = await asyncio.to_thread(tree_memory, workers), sum(worker.num_fds() for worker in workers)
    while True:
        used = await asyncio.to_thread(tree_memory, workers)
        played.memory_mb = max(played.memory_mb, used - idle_mb)
        played.files = max(played.files, sum(worker.num_fds() for worker in workers) - idle_files)
        await asyncio.sleep(_SAMPLE_S)


def judge(args: argparse.Namespace, played: Played, journal: Path) -> Verdict:
    """Compare each reward with the trial's own, and each wall with the seconds that were asked for."""
    lines = [json.loads(line) for file in journal.glob("*.jsonl") for line in file.read_text().splitlines()]
    lived = {line["trial"]: line for line in lines}
    outcomes: Counter[str] = Counter({"unanswered": played.unanswered} if played.unanswered else {})
    wrong, overheads, waits = 0, [], []
    for episode in played.episodes:
        if not episode.traces:
            outcomes["no trace"] += 1
            continue
        trace = episode.traces[-1]
        record = record_of(trace)
        outcome, _ = episode_outcome(episode, record)
        outcomes[outcome] += 1
        if record is None or not outcome.trains:
            continue
        seed = trace.id[:SEED_CHARS]
        wrong += not (abs(trace.reward - answer_of(seed) / 1000) < 1e-6 and record.turns == args.turns)
        if record.trial_name in lived:
            line = lived[record.trial_name]
            asked = line["asked_s"] + sum(seconds_of(seed, turn, *args.answer) for turn in range(args.turns))
            waits.append(asked)
            overheads.append(line["wall_s"] / asked)
    return Verdict(outcomes, wrong, overheads, waits, max((line["stall_s"] for line in lines), default=0.0))


def row(at: int, played: Played, verdict: Verdict) -> list[str]:
    """Return the figures of one measurement."""
    trials = len(played.episodes) + played.unanswered
    lost = trials - verdict.outcomes["completed"]
    asked = statistics.mean(verdict.asked_s) if verdict.asked_s else float("nan")
    overhead = f"{statistics.mean(verdict.overheads):.3f} ({max(verdict.overheads):.2f})" if verdict.overheads else "-"
    return [
        str(at),
        overhead,
        f"{60 * trials / played.wall_s:.0f} ({60 * at / asked:.0f})",
        f"{played.cpu_s / trials:.3f} ({played.own_cpu_s / trials:.3f})",
        f"{played.memory_mb / at:.1f}",
        f"{played.files / at:.1f}",
        f"{1000 * verdict.stall_s:.0f}",
        f"{lost} of {trials}",
        str(verdict.wrong),
    ]


def measure(args: argparse.Namespace, at: int, folder: Path, tokens: Path, console: Console) -> tuple[list[str], bool]:
    """Start an environment server, play, and return the row and whether the trials are as expected."""
    (folder / "journal").mkdir(parents=True)
    write_task(folder / "tasks" / "write-answer")
    env = config(args, folder)
    serve = {"pool": {"type": "static", "num_workers": args.workers}}
    variables = {"PYTHONPATH": os.pathsep.join([str(_HERE), os.environ.get("PYTHONPATH", "")])}
    server = EnvServer("scale", env, serve, log=folder / "server.log", variables=variables)
    with waiting_model(args.turns, *args.answer, tokenizer=tokens) as url:
        server.start()
        try:
            renderer = renderer_config("qwen3")
            client = TrainClientConfig(base_url=url, renderer=renderer, renderer_model_name=str(tokens))
            played = asyncio.run(play(args, at, env, server, client))
        finally:
            server.stop()
    verdict = judge(args, played, folder / "journal")
    others = {name: count for name, count in verdict.outcomes.items() if name != "completed"}
    if others:
        console.print(f"{at} in flight, not completed: {others}")
    return row(at, played, verdict), not verdict.wrong and (not others or bool(args.fault))


def _fault(text: str) -> tuple[str, float]:
    name, _, value = text.partition("=")
    return name, float(value)


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--at", type=int, nargs="+", default=[32, 128], help="trials in flight")
    parser.add_argument("--workers", type=int, default=2, help="worker processes, 1 to 4")
    parser.add_argument("--waves", type=int, default=2, help="trials that follow one another, for each in flight")
    parser.add_argument(
        "--turns",
        type=int,
        default=15,
        help="answers of a trial, at least 3: a command, and an end that Terminus-2 has confirmed",
    )
    parser.add_argument("--answer", type=float, nargs=2, default=[1.0, 3.0], help="seconds of an answer, from and to")
    parser.add_argument("--cap", type=int, help="n_parallel_envs; by default no cap")
    parser.add_argument("--fault", type=_fault, action="append", default=[], help="a field of Faults, NAME=SHARE")
    parser.add_argument("--fault-seconds", type=float, default=120.0, help="how long the faults last")
    parser.add_argument("--patience", type=float, default=1800.0, help="seconds before an episode counts as unanswered")
    args = parser.parse_args()
    if args.turns < 3:
        parser.error("--turns is at least 3")
    return args


def main() -> int:
    """Measure and print."""
    args, console, sound = parse(), Console(), True
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    table = Table(
        *("in flight", "overhead (max)", "a minute (ideal)", "CPU s (own)", "MB", "files", "stall ms", "lost", "wrong"),
        title=f"{args.turns} turns of {args.answer[0]:g} to {args.answer[1]:g} s, {args.workers} workers",
    )
    with tempfile.TemporaryDirectory(prefix="bench-scale-") as name:
        save_tokenizer(Path(name) / "tokenizer")
        for at in args.at:
            figures, as_expected = measure(args, at, Path(name) / str(at), Path(name) / "tokenizer", console)
            table.add_row(*figures)
            sound = sound and as_expected
    table.caption = f"load of the machine at the end: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores"
    console.print(table)
    return not sound


if __name__ == "__main__":
    sys.exit(main())
