"""Measure the cost of a local sandbox's own network, compared with this machine's network and with none.

    python benchmarks/networks.py                 about two minutes on an idle machine
    python benchmarks/networks.py --starts 20 --at 8

The figures are start, stop, CPU and throughput. The three arms alternate. CPU is counted for the whole machine, since
the kernel removes a network after the sandbox has ended.
"""

import argparse
import asyncio
import os
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")

import psutil
from harbor.models.task.config import EnvironmentConfig, NetworkMode, NetworkPolicy
from harbor.models.trial.paths import TrialPaths
from rich.console import Console
from rich.table import Table

from harbortrainer.sandbox.local import LocalEnvironment
from harbortrainer.sandbox.network_choice import slirp_problem

_ARMS = {
    "its own": (NetworkMode.PUBLIC, "own"),
    "the machine's": (NetworkMode.PUBLIC, "host"),
    "none": (NetworkMode.NO_NETWORK, "auto"),
}
_ROUNDS = 3
_APART_S = 0.1
_LIFE_S = 0.3


@dataclass
class Samples:
    """Figures of one arm, one per start or per round."""

    start_s: list[float] = field(default_factory=list)
    stop_s: list[float] = field(default_factory=list)
    per_minute: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)


@asynccontextmanager
async def sandbox(top: Path, arm: str, seen: Samples | None = None) -> AsyncGenerator[LocalEnvironment]:
    """Run a sandbox; add the seconds of its start and stop to `seen`."""
    mode, network = _ARMS[arm]
    made = LocalEnvironment(
        environment_dir=top,
        environment_name="bench",
        session_id="bench",
        trial_paths=TrialPaths(trial_dir=top / "trial"),
        task_env_config=EnvironmentConfig(),
        network_policy=NetworkPolicy(network_mode=mode),
        image="host",
        network=network,
    )
    began = time.perf_counter()
    await made.start(force_build=False)
    started = time.perf_counter()
    yield made
    ends = time.perf_counter()
    await made.stop(delete=True)
    if seen is not None:
        seen.start_s.append(started - began)
        seen.stop_s.append(time.perf_counter() - ends)


async def alone(top: Path, arm: str, seen: Samples, starts: int) -> None:
    """Start sandboxes one after the other, with a pause for the last one's cleanup."""
    for _ in range(starts):
        async with sandbox(top, arm, seen):
            pass
        await asyncio.sleep(_APART_S)


async def together(top: Path, arm: str, seen: Samples, starts: int, at_once: int) -> None:
    """Run `at_once` sandboxes concurrently, each for a moment with one command."""

    async def lane() -> None:
        for _ in range(starts):
            async with sandbox(top, arm) as running:
                await running.exec("true")
                await asyncio.sleep(_LIFE_S)

    used, began = machine_cpu_s(), time.perf_counter()
    await asyncio.gather(*(lane() for _ in range(at_once)))
    seen.per_minute.append(60 * starts * at_once / (time.perf_counter() - began))
    seen.cpu_s.append((machine_cpu_s() - used) / (starts * at_once))


def machine_cpu_s() -> float:
    """Return the CPU seconds of the whole machine, summed over its processors."""
    times = psutil.cpu_times()
    return sum(times) - times.idle - times.iowait


async def measure(starts: int, at_once: int) -> dict[str, Samples]:
    """Measure the arms alternately."""
    found = {arm: Samples() for arm in _ARMS}
    with tempfile.TemporaryDirectory(prefix="bench-networks-") as folder:
        for arm in _ARMS:
            await alone(Path(folder), arm, Samples(), 2)
        for _ in range(_ROUNDS):
            for arm, seen in found.items():
                await alone(Path(folder), arm, seen, starts)
                await together(Path(folder), arm, seen, starts, at_once)
    return found


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--starts", type=int, default=15, help="starts per round and lane")
    parser.add_argument("--at", type=int, default=16, help="concurrent sandboxes")
    args, console = parser.parse_args(), Console()
    if why := slirp_problem():
        console.print(f"a sandbox cannot have its own network here: {why}")
        return 2
    found = asyncio.run(measure(args.starts, args.at))
    table = Table("network", "start ms", "stop ms", f"a minute at {args.at}", "CPU ms each")
    for arm, seen in found.items():
        start, stop, rate, cpu = map(statistics.median, (seen.start_s, seen.stop_s, seen.per_minute, seen.cpu_s))
        table.add_row(arm, f"{1000 * start:.0f}", f"{1000 * stop:.0f}", f"{rate:.0f}", f"{1000 * cpu:.1f}")
    console.print(table)
    own, machines = (statistics.median(found[arm].per_minute) for arm in ("its own", "the machine's"))
    console.print(f"throughput with its own network: {own / machines:.2f} times that with the machine's network")
    return 0


if __name__ == "__main__":
    sys.exit(main())
