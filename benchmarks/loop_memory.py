"""Run the training loop of the embedded engine on scripted trials, and print how its memory grows.

    python benchmarks/loop_memory.py                      20 000 trials in about 1300 steps; a minute of CPU
    TMPDIR=/dev/shm python benchmarks/loop_memory.py --trials 100000

The loop, its checks and its files are a run's own. The environment server, the sampler and the learner return scripted
data at once (`tests/scripted_run.py`). The exit code is 1 if the process grows by more than 400 bytes a trial after the
first tenth. Python before 3.12.6 never frees the names of files, which is about half of that.
"""

import argparse
import asyncio
import os
import sys
import tempfile
from collections.abc import Sequence
from contextlib import redirect_stdout
from pathlib import Path

os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "engines"))

import psutil
from rich.console import Console
from rich.table import Table
from scripted_run import FakeComponents, ScriptedRun  # ty: ignore[import-not-found] (the tests' own)

from harbortrainer.engines.local.learner.training_sample import Sample
from harbortrainer.runs.memory import frozen_gc, limit_malloc_arenas

_TENTHS = 10
_TRIALS_A_STEP = 15
"""Scripted trials of a step, untrained ones included."""
_MOST_BYTES = 400


class MeasuredComponents(FakeComponents):
    """Scripted components that keep nothing, and measure the process before each step."""

    def __init__(self) -> None:
        super().__init__()
        self.measured: list[tuple[int, int]] = []
        """Trials started and resident bytes, for each step."""

    def train(self, samples: Sequence[Sample], rescored: Sequence[object] = ()) -> dict[str, float]:
        """Measure, and forget what the fake learner keeps for tests."""
        self.measured.append((sum(self.started.values()), psutil.Process().memory_info().rss))
        numbers = super().train(samples, rescored)
        for kept in (self.trained, self.rescored, self.rescored_versions):
            kept.clear()
        return numbers


def main() -> int:
    """Run the loop, print the memory at every tenth of the steps, and return whether it grew."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=20_000)
    steps, components = parser.parse_args().trials // _TRIALS_A_STEP, MeasuredComponents()
    limit_malloc_arenas()
    with (
        tempfile.TemporaryDirectory(prefix="bench-loop-") as folder,
        Path(os.devnull).open("w", encoding="utf-8") as quiet,
        redirect_stdout(quiet),
        frozen_gc(),
    ):
        asyncio.run(ScriptedRun(Path(folder), steps, components).train())
    shown = components.measured[steps // _TENTHS - 1 :: steps // _TENTHS]
    table = Table("trials", "MB", "bytes a trial")
    for (before, was), (trials, memory) in zip([shown[0], *shown], shown, strict=False):
        table.add_row(str(trials), f"{memory / 1e6:.1f}", f"{(memory - was) / max(1, trials - before):.0f}")
    (first, least), (last, most) = shown[0], shown[-1]
    growth = (most - least) / (last - first)
    Console().print(table, f"{growth:.0f} bytes a trial after the first tenth; at most {_MOST_BYTES}")
    return growth > _MOST_BYTES


if __name__ == "__main__":
    sys.exit(main())
