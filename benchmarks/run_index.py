"""Measure the index of a large run: time to build it, its size, and the time of the dashboard's queries.

    python benchmarks/run_index.py [--trials 100000] [--keep FOLDER]

Writes a synthetic run (with lines as the embedded engine writes them) and indexes it. Then opens it in a new process
and runs the queries of the pages. Prints CPU seconds, which exclude the load of other programs, and the memory of that
process. The run is deleted unless `--keep` is set.
"""

import argparse
import json
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from harbortrainer.view.index import NAME
from harbortrainer.view.queries import IndexedRun, TrialFilter
from harbortrainer.view.run_folders import open_store

BATCH, GROUP, TASKS, HELD_OUT, EVERY = 256, 8, 2000, 200, 10


def write_synthetic_run(folder: Path, trials: int) -> None:
    """Write a run with `trials` trials, including evaluations."""
    draw = random.Random(0)
    (folder / "rollouts").mkdir(parents=True)
    (folder / "config.toml").write_text('[model]\nname = "org/policy"\n')
    left, step = trials, 0
    with (folder / "metrics.jsonl").open("w") as metrics:
        while left > 0:
            step += 1
            rows = list(training(draw, step, min(BATCH, left)))
            left -= len(rows)
            write(folder / f"rollouts/step_{step}.jsonl", rows)
            metrics.write(json.dumps({"step": step, "loss": draw.random()} | dict.fromkeys(METRICS, 0.5)) + "\n")
            if step % EVERY == 0 and left >= HELD_OUT:
                left -= HELD_OUT
                write(folder / f"rollouts/eval_step_{step}.jsonl", [held_out(draw, step, n) for n in range(HELD_OUT)])


METRICS = [f"train/agg/all/agent/reward/{name}" for name in ("mean", "min", "max", "p10", "p90")] + [
    f"time/part_{number}" for number in range(60)
]


def write(file: Path, rows: list[dict[str, object]]) -> None:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def training(draw: random.Random, step: int, count: int) -> Iterator[dict[str, object]]:
    """Yield the rows of one step, in groups."""
    for number in range(count):
        if number % GROUP == 0:
            task, group = draw.randrange(TASKS), f"{draw.getrandbits(48):012x}"
        lost = draw.random() < 0.02
        told = {"group": group, "advantage": None if lost else draw.uniform(-1, 1)}
        yield (
            line(draw, f"task-{task}", step, lost) | told | {"kind": "train", "not_trained": "failed" if lost else None}
        )


def held_out(draw: random.Random, step: int, number: int) -> dict[str, object]:
    return line(draw, f"held-out-{number}", step, lost=False) | {"kind": "eval"}


def line(draw: random.Random, task: str, step: int, lost: bool) -> dict[str, object]:
    timings = {name: draw.uniform(1, 60) for name in ("environment_setup", "agent_execution", "model", "total")}
    return {
        "step": step,
        "source": "made-up",
        "task": task,
        "task_key": f"{random.Random(task).getrandbits(256):064x}",
        "trial": f"{task}__{draw.getrandbits(48):012x}",
        "outcome": "sandbox_error" if lost else draw.choice(("completed", "completed", "turn_limit")),
        "reward": None if lost else float(draw.random() < step / 1000),
        "rewards": {"reward": 1.0},
        "turns": draw.randrange(1, 30),
        "tokens": {"input": draw.randrange(30000), "output": draw.randrange(8000), "total": 38000},
        "timings": timings,
        "version": step - 1,
        "steps": [],
        "error": "sandbox_error: it died" if lost else None,
        "transcript": [draw.randrange(10**7), 4000],
    }


def time_queries(folder: Path) -> dict[str, float]:
    """Return the CPU seconds of opening an indexed run and of each query, in this process."""
    began = time.process_time()
    store = open_store(folder)
    assert isinstance(store, IndexedRun)
    took = {"open": time.process_time() - began}
    some = store.find(TrialFilter())[0][0]
    asked: dict[str, Callable[[], object]] = {
        "nothing new": store.refresh,
        "metrics": store.metrics,
        "outcomes": store.outcomes,
        "training counts": store.training_counts,
        "seconds": store.seconds,
        "rewards": lambda: store.rewards("train", 1),
        "cells": lambda: store.cells("train"),
        "choices": store.choices,
        "newest 50": lambda: store.find(TrialFilter()),
        "page 1000": lambda: store.find(TrialFilter(page=1000)),
        "filtered, sorted": lambda: store.find(TrialFilter(outcome="completed", reward="1", sort="-tokens")),
        "a group": lambda: store.group(some.group or ""),
    }
    for name, ask in asked.items():
        began = time.process_time()
        ask()
        took[name] = time.process_time() - began
    return took | {"memory (MB)": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1000}


def main() -> None:
    """Write a run, index it, and time its queries in a new process."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--trials", type=int, default=100_000)
    parser.add_argument("--keep", type=Path, help="folder to keep the run in")
    parser.add_argument("--look", type=Path, help=argparse.SUPPRESS)
    order = parser.parse_args()
    if order.look is not None:
        print(json.dumps(time_queries(order.look)))
        return
    with tempfile.TemporaryDirectory() as scratch:
        folder = order.keep or Path(scratch) / "run"
        if not folder.exists():
            write_synthetic_run(folder, order.trials)
        lines = sum(file.stat().st_size for file in folder.glob("rollouts/*")) / 1e6
        began = time.process_time()
        open_store(folder)
        print(f"{order.trials} trials, {lines:.0f} MB of lines: indexed in {time.process_time() - began:.2f} s of CPU")
        print(f"index {(folder / NAME).stat().st_size / 1e6:.1f} MB; memory of this process at most", end=" ")
        print(f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1000:.0f} MB")
        again = subprocess.run([sys.executable, __file__, "--look", str(folder)], capture_output=True, check=True)
        for name, value in json.loads(again.stdout).items():
            print(f"  {name:<18}{value:10.0f}" if "MB" in name else f"  {name:<18}{1000 * value:10.1f} ms")


if __name__ == "__main__":
    main()
