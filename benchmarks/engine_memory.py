"""What the embedded engine holds at most while it samples and trains: the base once, twice, and by another checkout.

As a script it is one arm, played by the checkout that PYTHONPATH names; the setting comes from standard input, what was
found goes to standard output, as JSON.
"""

import importlib
import json
import multiprocessing
import os
import re
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from pathlib import Path

from benchmarks.engine_ours import Ours
from benchmarks.engine_setting import Setting

STEPS = 2


def peaks(case: Setting, before: Path | None = None) -> dict[str, float]:
    """GiB at most of a process that plays `STEPS` steps, by arm; one after the other, each in a process of its own.

    Args:
        before: A checkout of this project at another commit, whose code plays the same, on the libraries of this one.
    """
    arms = {"the base once": _in_a_process(case, False), "the base twice": _in_a_process(case, True)}
    if before is not None:
        arms[f"{before}"] = _by_checkout(case, before)
    found = {}
    for arm, (libraries, peak) in arms.items():
        found |= {f"peak GiB, {arm}": peak, f"  without libraries, {arm}": peak - libraries}
    return found


def _in_a_process(case: Setting, twice: bool) -> tuple[float, float]:
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(_play, case, twice).result()


def _by_checkout(case: Setting, checkout: Path) -> tuple[float, float]:
    root = checkout.absolute()
    environment = os.environ | {"PYTHONPATH": f"{root}{os.pathsep}{root / 'src'}"}
    asked = json.dumps(asdict(case), default=str)  # longer than a command line may be
    played = subprocess.run(
        [sys.executable, "-P", __file__],
        env=environment,
        cwd=root,
        check=True,
        input=asked,
        stdout=subprocess.PIPE,
        text=True,
    )
    libraries, peak = json.loads(played.stdout.splitlines()[-1])
    return libraries, peak


def _play(case: Setting, twice: bool = False) -> tuple[float, float]:
    """GiB before a model was there, and at most afterwards."""
    import torch
    from transformers.utils import logging

    for library in (
        "peft",
        "transformers.generation.continuous_batching",
        "harbortrainer.engines.local.learner.learner",
    ):
        importlib.import_module(library)  # their own memory comes first
    torch.set_num_threads(1)
    logging.disable_progress_bar()
    libraries = _peak(case)
    ours = Ours(case, twice=True) if twice else Ours(case)
    try:
        for _ in range(STEPS):
            ours.step()
    finally:
        ours.close()
    return libraries, _peak(case)


def _peak(case: Setting) -> float:
    """The most that was resident, or allocated on the GPU, until now."""
    if case.device == "cuda":
        import torch

        return torch.cuda.max_memory_allocated() / 2**30
    kilobytes = re.search(r"^VmHWM:\s*(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert kilobytes is not None
    return int(kilobytes[1]) / 2**20


if __name__ == "__main__":
    told = json.load(sys.stdin)
    print(json.dumps(_play(Setting(**told | {"folder": Path(told["folder"])}))))
