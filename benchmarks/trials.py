"""Compare the speed of trials with stock Terminus-2: same task, same sandbox, same scripted model.

    python benchmarks/trials.py                       everything (about 15 minutes; prints its minimum duration first)
    python benchmarks/trials.py --turns 3 --at 8 --repeats 1 --seconds 5
    python benchmarks/trials.py --environment docker --turns 3 --at 4 --in-flight 0

The local sandbox uses the host's root, as in the quickstart; `--image build` uses the task's image, which is built
first. Prints, as medians over repeats and with the ratios:

- trials per minute
- CPU seconds per trial, over all processes except the model server
- the longest stall of the event loop

Then prints the memory of one trial in flight.
"""

import argparse
import asyncio
import gc
import logging
import os
import statistics
import tempfile
import time
from collections.abc import Awaitable
from dataclasses import dataclass, replace
from pathlib import Path

os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")

import psutil
from meters import CpuClock, tree_memory, watched_loop
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from scripted_model import model_server
from trial_arms import ARMS, Arm, Setting

from harbortrainer.runs.memory import freeze_gc

_MODEL_DELAY_S = 0.02
_IN_FLIGHT_DELAY_S = 6.0
_TASK = {
    "task.toml": "[agent]\ntimeout_sec = 600\n",
    "instruction.md": "Write 42 to /app/answer.\n",
    "environment/Dockerfile": "FROM debian:12-slim\nWORKDIR /app\n",
    "tests/test.sh": "#!/bin/bash\ngrep -qx 42 /app/answer && r=1 || r=0\necho $r > /logs/verifier/reward.txt\n",
}


@dataclass(frozen=True)
class Measure:
    """Figures of one measurement."""

    per_minute: float
    cpu_s: float
    stall_ms: float = 0.0
    """Longest stall of the event loop, set by `watched`."""


async def measure(
    arm: Arm, setting: Setting, at_once: int, seconds: float, clock: CpuClock, server: psutil.Process
) -> Measure:
    """Run `at_once` trials concurrently for `seconds`; trials that run at the end finish and count."""
    end, done = time.perf_counter() + seconds, 0

    async def lane() -> None:
        nonlocal done
        while time.perf_counter() < end:
            await arm(setting)
            done += 1

    begin, cpu = time.perf_counter(), clock.read(server)
    await asyncio.gather(*(lane() for _ in range(at_once)))
    wall = time.perf_counter() - begin
    return Measure(60 * done / wall, (clock.read(server) - cpu) / done)


async def watched(measuring: Awaitable[Measure]) -> Measure:
    """Add the event loop's longest stall to a measurement. It costs CPU: a wake-up every millisecond."""
    async with watched_loop() as stall:
        measured = await measuring
    return replace(measured, stall_ms=1000 * stall.longest_s)


def settle(name: str) -> None:
    """Set the garbage collector as each side has it: our workers exclude the imported objects."""
    gc.unfreeze()
    gc.collect()
    if name == "ours":
        freeze_gc()


def median(measures: list[Measure]) -> Measure:
    """Return the median of each figure."""
    fields = ("per_minute", "cpu_s", "stall_ms")
    return Measure(*(statistics.median(getattr(m, field) for m in measures) for field in fields))


async def compare(args: argparse.Namespace, turns: int, task: Path, clock: CpuClock, progress: Progress) -> Table:
    """Measure all arms at every concurrency. The arms alternate, so that machine load affects all of them."""
    table = Table("at once", "arm", "trials/min", "CPU s/trial", "longest stall", "x ours", title=f"{turns} turns")
    total = len(args.at) * args.repeats * len(args.arms)
    bar = progress.add_task(f"{turns} turns", total=total)
    with model_server(turns, _MODEL_DELAY_S) as (url, pid):
        setting, server = Setting(task, url, args.environment, args.image), psutil.Process(pid)
        for name in args.arms:  # imports, layers and connections
            await ARMS[name](setting)
        for at_once in args.at:
            found: dict[str, list[Measure]] = {name: [] for name in args.arms}
            for _ in range(args.repeats):
                for name in args.arms:
                    settle(name)
                    measuring = measure(ARMS[name], setting, at_once, args.seconds, clock, server)
                    found[name].append(await watched(measuring))
                    progress.advance(bar)
            _rows(table, at_once, {name: median(measures) for name, measures in found.items()})
    if not clock.exact:
        table.caption = "CPU is counted for the whole machine, which is exact on an idle machine only"
    return table


def _rows(table: Table, at_once: int, found: dict[str, Measure]) -> None:
    ours = found.get("ours")
    for name, m in found.items():
        speed, cpu = (ours.per_minute / m.per_minute, m.cpu_s / ours.cpu_s) if ours else (0.0, 0.0)
        ratio = "" if ours is None or name == "ours" else f"{speed:.2f} faster, {cpu:.2f} less CPU"
        table.add_row(str(at_once), name, f"{m.per_minute:.0f}", f"{m.cpu_s:.3f}", f"{m.stall_ms:.0f} ms", ratio)


async def memory_in_flight(name: str, task: Path, environment: tuple[str, str], count: int) -> float:
    """Return the megabytes per trial while `count` trials wait for the model, including their child processes."""
    with model_server(3, _IN_FLIGHT_DELAY_S) as (url, _):
        setting = Setting(task, url, *environment)
        await ARMS[name](setting)
        before = await asyncio.to_thread(tree_memory)
        running = asyncio.gather(*(ARMS[name](setting) for _ in range(count)))
        highest = 0.0
        for _ in range(int(2 * _IN_FLIGHT_DELAY_S)):
            await asyncio.sleep(0.5)
            highest = max(highest, await asyncio.to_thread(tree_memory))
        await running
    return (highest - before) / count


def write_task(folder: Path) -> Path:
    """Write the task that both sides run; return its folder."""
    for name, text in _TASK.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, nargs="+", default=[3, 30])
    parser.add_argument("--at", type=int, nargs="+", default=[1, 8, 16], help="concurrent trials")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=15.0, help="duration of each measurement")
    parser.add_argument("--arms", nargs="+", choices=list(ARMS), default=["ours", "stock", "stock + tokens"])
    parser.add_argument("--environment", default="local")
    parser.add_argument("--image", choices=["host", "build", "auto"], default="host", help="root of a local sandbox")
    parser.add_argument("--in-flight", type=int, default=32, help="trials for the memory figure; 0 leaves it out")
    return parser.parse_args()


def minutes(args: argparse.Namespace) -> float:
    """Return the minimum duration in minutes."""
    stretches = len(args.turns) * len(args.at) * args.repeats * len(args.arms)
    waits = len(args.arms) * 4 * _IN_FLIGHT_DELAY_S if args.in_flight else 0.0
    return (stretches * args.seconds + waits) / 60


def main() -> None:
    """Measure and print."""
    args, console = parse(), Console()
    logging.disable(logging.WARNING)
    console.print(f"at least {minutes(args):.1f} minutes")
    with CpuClock() as clock, tempfile.TemporaryDirectory(prefix="bench-task-") as folder:
        task = write_task(Path(folder) / "write-answer")
        with Progress(console=console, transient=True) as progress:
            tables = [asyncio.run(compare(args, turns, task, clock, progress)) for turns in args.turns]
        for table in tables:
            console.print(table)
        for name in args.arms if args.in_flight else []:
            used = asyncio.run(memory_in_flight(name, task, (args.environment, args.image), args.in_flight))
            console.print(f"memory per trial in flight, {args.in_flight} at once, {name}: {used:.1f} MB")


if __name__ == "__main__":
    main()
