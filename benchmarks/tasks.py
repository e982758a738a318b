"""Measure time and memory to load a folder of many tasks: `python benchmarks/tasks.py --tasks 3500`.

The generated tasks resemble public sets: a Dockerfile, a test with data, a page of instructions. The baseline is `tar`,
which reads every byte of the same files, as hashing them must.
"""

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

LOAD = "import sys; from harbortrainer.tasks.task_folder import load_folder; print(len(load_folder(sys.argv[1])))"


def generate(folder: Path, count: int) -> None:
    """Write `count` tasks in twenty categories, with seven files each."""
    for number in range(count):
        task = folder / f"category-{number % 20:02}" / f"task-{number:05}"
        for part in ("environment", "solution", "tests"):
            (task / part).mkdir(parents=True)
        (task / "task.toml").write_text('version = "1.0"\n[verifier]\ntimeout_sec = 60.0\n')
        (task / "instruction.md").write_text(f"Task {number}. " + "Write the numbers of the table into a file. " * 40)
        (task / "environment/Dockerfile").write_text("FROM debian:12-slim\nCOPY data.csv /app/\n")
        (task / "environment/data.csv").write_text("a,b,c\n" * 500)
        (task / "solution/solve.sh").write_text("#!/bin/sh\necho 1 > /app/out\n")
        (task / "tests/test.sh").write_text("echo 1 > /logs/verifier/reward.txt\n")
        (task / "tests/expected.json").write_text(json.dumps(list(range(200))))


def timed(words: list[str]) -> tuple[float, float]:
    """Run a command; return its wall seconds and CPU seconds."""
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run(words, check=True, stdout=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return time.perf_counter() - start, cpu


def main() -> None:
    """Generate tasks, load and read them alternately, and print the medians and their ratio."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", type=int, default=3500)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="tasks-") as name:
        generate(Path(name), options.tasks)
        arms = {"load": [sys.executable, "-c", LOAD, name], "tar": ["tar", "-cf", "-", "-C", name, "."]}
        runs: dict[str, list[tuple[float, float]]] = {arm: [] for arm in arms}
        for _ in range(options.repeats):
            for arm, words in arms.items():
                runs[arm].append(timed(words))
    for arm, measured in runs.items():
        wall, cpu = (statistics.median(column) for column in zip(*measured, strict=True))
        print(f"{arm:5} {wall:6.2f} s wall {cpu:6.2f} s CPU")
    ratio = statistics.median(wall for wall, _ in runs["load"]) / statistics.median(wall for wall, _ in runs["tar"])
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1000
    print(f"loading {options.tasks} tasks takes {ratio:.1f} times as long as reading them; peak memory {peak:.0f} MB")


if __name__ == "__main__":
    main()
