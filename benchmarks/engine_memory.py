"""Peak memory of the embedded engine while it samples and trains.

The arms: the base model loaded once, loaded twice, and another checkout of this project. As a script this measures one
arm, with the checkout that PYTHONPATH names. It reads the setting from stdin and prints the result, both as JSON.
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
    """Return the peak GiB of a process that runs `STEPS` steps, by arm. Each arm has its own process.

    Args:
        before: A checkout of this project at another commit. It runs the same steps with this checkout's libraries.
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
    asked = json.dumps(asdict(case), default=str)  # too long for a command line
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
    """Return the peak GiB before a model is loaded, and after the steps."""
    import torch
    from transformers.utils import logging

    for library in (
        "peft",
        "transformers.generation.continuous_batching",
        "harbortrainer.engines.local.learner.learner",
    ):
        importlib.import_module(library)  # so that their memory counts as the libraries'
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
    """Return the peak GiB so far: resident memory, or memory allocated on the GPU."""
    if case.device == "cuda":
        import torch

        return torch.cuda.max_memory_allocated() / 2**30
    kilobytes = re.search(r"^VmHWM:\s*(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert kilobytes is not None
    return int(kilobytes[1]) / 2**20


if __name__ == "__main__":
    told = json.load(sys.stdin)
    print(json.dumps(_play(Setting(**told | {"folder": Path(told["folder"])}))))
