"""Compare the speed of whole episodes with tokens for training: our plugin, stock Harbor, verifiers' own taskset.

    python benchmarks/episodes.py                                    prints its minimum duration first
    python benchmarks/episodes.py --turns 3 --at 8 --seconds 20 --arms docker
    python benchmarks/episodes.py --renderer default                 a chat format that renders everything each turn
    python benchmarks/episodes.py --renderer appending               the same template, with turns appended

verifiers' own taskset runs on verifiers 0.4, which `make setup-today` installs.

All arms run the same task with real token ids. The scripted model (20 ms an answer) runs in another process, which is
not counted. The arms alternate. The columns, with the ratio to stock Harbor in Docker:

- seconds of one episode alone
- episodes per minute
- CPU seconds per episode
- memory per episode in flight
- rows per episode for the trainer

With Docker, CPU is counted for the whole machine, since a daemon works for the benchmark too. That is exact on an idle
machine only. On a busy one, start a separate daemon in a control group (`--cgroup-parent` of the same name, DOCKER_HOST
set), and pass that group: `--group /sys/fs/cgroup/cpuacct/NAME`.
"""

import argparse
import asyncio
import logging
import os
import statistics
import tempfile
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")

import psutil
from episode_arms import EPISODES, RIVAL, Stack
from meters import CpuClock, tree_memory
from rich.console import Console
from rich.table import Table
from scripted_model import model_server, save_tokenizer
from trial_arms import Arm, Setting
from trials import Measure, measure, median, settle, write_task

from harbortrainer.engines.env_server.env_main import raise_priority

_MODEL_DELAY_S = 0.02


@dataclass(frozen=True)
class Figures:
    """Figures of one arm at one concurrency."""

    measured: Measure
    memory_mb: float
    rows: int


async def alone(arm: Arm, setting: Setting, count: int) -> float:
    """Return the median seconds of `count` episodes that run one after the other."""
    times = []
    for _ in range(count):
        begin = time.perf_counter()
        await arm(setting)
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


async def in_flight(arm: Arm, setting: Setting, at_once: int, clock: CpuClock) -> float:
    """Return the megabytes per episode while `at_once` episodes run, including all their child processes."""
    before, highest = await asyncio.to_thread(tree_memory, clock.processes()), 0.0
    running = asyncio.gather(*(arm(setting) for _ in range(at_once)))
    while not running.done():
        highest = max(highest, await asyncio.to_thread(tree_memory, clock.processes()))
        await asyncio.sleep(0.2)
    await running
    return max(0.0, highest - before) / at_once


async def compare(args: argparse.Namespace, turns: int, folder: Path, clock: CpuClock, console: Console) -> None:
    """Measure all arms at every concurrency, and print each table when it is complete."""
    tokenizer = folder / "tokenizer"
    with model_server(turns, _MODEL_DELAY_S, str(tokenizer), args.renderer) as (url, pid):
        setting, server = Setting(folder / "tasks" / "write-answer", url, "docker"), psutil.Process(pid)
        stack = Stack(setting, tokenizer, args.renderer, folder / "trials")
        async with AsyncExitStack() as opened:
            arms = {name: await opened.enter_async_context(EPISODES[name](stack)) for name in args.arms}
            rows = {name: await arm(setting) for name, arm in arms.items()}  # imports, images and connections
            walls = {name: await alone(arm, setting, args.alone) for name, arm in arms.items()}
            console.print(_latency_table(turns, walls, rows))
            for at_once in args.at:
                found: dict[str, list[Measure]] = {name: [] for name in arms}
                memory: dict[str, float] = {}
                for _ in range(args.repeats):
                    for name, arm in arms.items():
                        settle("ours" if name != RIVAL else name)
                        found[name].append(await measure(arm, setting, at_once, args.seconds, clock, server))
                for name, arm in arms.items():
                    memory[name] = await in_flight(arm, setting, at_once, clock)
                console.print(_throughput_table(turns, at_once, {name: median(m) for name, m in found.items()}, memory))


def _latency_table(turns: int, walls: dict[str, float], rows: dict[str, int]) -> Table:
    table = Table("arm", "seconds alone", "x stock", "rows", title=f"{turns} turns, one episode at a time")
    for name, wall in walls.items():
        table.add_row(name, f"{wall:.2f}", _ratio(walls.get(RIVAL), wall), str(rows[name]))
    return table


def _throughput_table(turns: int, at_once: int, found: dict[str, Measure], memory: dict[str, float]) -> Table:
    title = f"{turns} turns, {at_once} at once; load of the machine {os.getloadavg()[0]:.1f}"
    table = Table("arm", "a minute", "x stock", "CPU s", "x stock", "MB in flight", title=title)
    rival = found.get(RIVAL)
    for name, m in found.items():
        faster = _ratio(m.per_minute, rival.per_minute) if rival else "-"
        less = _ratio(rival.cpu_s, m.cpu_s) if rival else "-"
        table.add_row(name, f"{m.per_minute:.1f}", faster, f"{m.cpu_s:.2f}", less, f"{memory[name]:.0f}")
    return table


def _ratio(more: float | None, less: float | None) -> str:
    return f"{more / less:.2f}" if more and less else "-"


def _matching(word: str) -> list[str]:
    return [name for name in EPISODES if word in name]


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, nargs="+", default=[3, 30])
    parser.add_argument("--at", type=int, nargs="+", default=[2, 4, 8, 16], help="concurrent episodes")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=20.0, help="duration of each measurement")
    parser.add_argument("--alone", type=int, default=5, help="episodes for the time of one episode alone")
    parser.add_argument("--renderer", choices=["qwen3", "default", "appending"], default="qwen3")
    parser.add_argument("--arms", nargs="+", default=[""], help=f"parts of the names: {', '.join(EPISODES)}")
    parser.add_argument("--group", type=Path, help="cpuacct control group (cgroup v1) that counts the CPU")
    args = parser.parse_args()
    args.arms = list(dict.fromkeys(name for word in args.arms for name in _matching(word)))
    return args


def main() -> None:
    """Measure and print."""
    args, console = parse(), Console()
    logging.disable(logging.WARNING)
    stretches = len(args.turns) * len(args.at) * args.repeats * len(args.arms)
    console.print(f"at least {stretches * args.seconds / 60:.1f} minutes")
    clock = CpuClock(args.group, machine=args.group is None and any("docker" in name for name in args.arms))
    # As for a run's environment servers; all arms get the same priority.
    with clock, raise_priority(), tempfile.TemporaryDirectory(prefix="bench-episodes-") as name:
        folder = Path(name)
        write_task(folder / "tasks" / "write-answer")
        save_tokenizer(folder / "tokenizer")
        for turns in args.turns:
            asyncio.run(compare(args, turns, folder, clock, console))


if __name__ == "__main__":
    main()
