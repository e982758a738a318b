"""What the embedded engine holds at most while it samples and trains: the base once, and twice."""

import multiprocessing
import re
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from benchmarks.engine_ours import Ours
from benchmarks.engine_setting import Setting

STEPS = 2


def peaks(case: Setting) -> dict[str, float]:
    """GiB at most of a process that plays `STEPS` steps, by arm; one after the other, each in a process of its own."""
    found = {}
    for arm, twice in (("the base once", False), ("the base twice", True)):
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
            before, peak = pool.submit(_play, case, twice).result()
        found |= {f"peak GiB, {arm}": peak, f"  without libraries, {arm}": peak - before}
    return found


def _play(case: Setting, twice: bool) -> tuple[float, float]:
    """GiB before a model was there, and at most afterwards."""
    import torch
    from transformers.utils import logging

    import harbortrainer.engines.local.learner.learner
    import harbortrainer.engines.local.sampler.sampling_engine  # noqa: F401 (the libraries' own memory comes first)

    torch.set_num_threads(1)
    logging.disable_progress_bar()
    before = _peak(case)
    ours = Ours(case, twice=twice)
    try:
        for _ in range(STEPS):
            ours.step()
    finally:
        ours.close()
    return before, _peak(case)


def _peak(case: Setting) -> float:
    """The most that was resident, or allocated on the GPU, until now."""
    if case.device == "cuda":
        import torch

        return torch.cuda.max_memory_allocated() / 2**30
    kilobytes = re.search(r"^VmHWM:\s*(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert kilobytes is not None
    return int(kilobytes[1]) / 2**20
