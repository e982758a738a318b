"""Compare the memory plan with the memory that a GPU allocates, for cards of a given size.

For each case the embedded engine trains two steps on samples of the longest length that the plan allows. The process
may allocate no more than the card's size, so a plan that promises too much ends as an out-of-memory error.

    benchmarks/gpu_memory.py qwen3-1.7b:16 qwen3-8b:48 qwen3-0.6b:16:full

A case is SHAPE:GIB, with `:full` for full fine-tuning. The weights are random, so nothing is downloaded.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.engine_ours import post_all
from benchmarks.engine_setting import SHAPES, write_model

STEPS = 2
SAMPLED = 64
"""Tokens that the model samples at the end of each sample; the rest is prompt."""
GIB = 1024**3


def measure(shape: str, gib: float, full: bool, folder: Path) -> dict[str, float | str]:
    """Train on samples of the plan's longest length; return planned and allocated GiB.

    Raises:
        torch.OutOfMemoryError: The plan promised too much.
    """
    import torch
    from transformers.utils import logging

    from harbortrainer.config.trainer_table import DefaultLoss, LoraSettings, OptimSettings
    from harbortrainer.engines.engine_choice import USABLE_SHARE
    from harbortrainer.engines.local.learner.learner import Learner
    from harbortrainer.engines.local.learner.training_sample import Sample
    from harbortrainer.engines.local.sampler import Sampler
    from harbortrainer.engines.local.weight_update import update_weights
    from harbortrainer.engines.memory_count import plan_memory

    logging.disable_progress_bar()
    write_model(folder, shape, device="cuda", dtype="bfloat16", max_tokens=40_960)
    torch.cuda.empty_cache()
    capacity = int(gib * GIB * USABLE_SHARE)
    torch.cuda.set_per_process_memory_fraction(min(1.0, capacity / torch.cuda.mem_get_info()[1]))
    lora = None if full else LoraSettings(rank=16, alpha=32)
    plan = plan_memory(folder, lora, device_type="cuda", capacity=capacity, off_policy=1)
    longest = plan.max_length
    result: dict[str, float | str] = {"case": f"{shape}, {gib:g} GB{', full' if full else ''}", "longest": longest}
    if not longest:
        return result | {"outcome": "the plan refuses it"}
    sampler = Sampler(folder, max_model_len=longest, cache_tokens=plan.cache(longest, longest)).start()
    try:
        learner = Learner(
            folder, lora, OptimSettings(lr=1e-5), DefaultLoss(), seq_len=longest, base=sampler.model, device="cuda",
            keep_versions=2, micro_batch_tokens=plan.micro_batch(longest, longest),
        )  # fmt: skip
        seconds = []
        for step in range(STEPS):
            update_weights(learner, sampler)
            draw = random.Random(step)
            prompts = [[draw.randrange(3, 250) for _ in range(longest - SAMPLED)] for _ in range(2)]
            sampling = {"max_tokens": SAMPLED, "ignore_eos": True, "logprobs": 1}
            bodies = [{"token_ids": prompt, "sampling_params": sampling} for prompt in prompts]
            _, choices = post_all(sampler.url, sampler.api_key, bodies)
            samples = [
                Sample(
                    token_ids=[*prompt, *choice["token_ids"]],
                    mask=[False] * len(prompt) + [True] * SAMPLED,
                    logprobs=[0.0] * len(prompt) + [e["logprob"] for e in choice["logprobs"]["content"]],
                    versions=[learner.version] * longest,
                    temperature=1.0,
                    advantage=advantage,
                )
                for prompt, choice, advantage in zip(prompts, choices, (1.0, -1.0), strict=True)
            ]
            start = time.perf_counter()
            metrics = learner.train(samples)
            seconds.append(time.perf_counter() - start)
    finally:
        sampler.stop()
    return result | {
        "outcome": "trained",
        "planned_gib": sum(plan.breakdown(longest, longest).values()) / GIB,
        "allocated_gib": torch.cuda.max_memory_allocated() / GIB,
        "reserved_gib": torch.cuda.max_memory_reserved() / GIB,
        "step_s": seconds[-1],
        "logprob_noise": metrics["proof/noise"],
        "logprob_diff_max": metrics["proof/logprob_diff/max"],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description="Compare the memory plan with the memory that a GPU allocates")
    parser.add_argument("cases", nargs="+", metavar="SHAPE:GIB[:full]", help=f"shapes: {', '.join(sorted(SHAPES))}")
    parser.add_argument("--json", type=Path, default=None, help="file for one JSON line per case")
    parser.add_argument("--alone", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if not arguments.alone:  # a process for each case: memory fraction and peaks belong to a process
        same = [sys.executable, __file__, "--alone", *(["--json", str(arguments.json)] if arguments.json else [])]
        codes = [subprocess.run([*same, case], check=False).returncode for case in arguments.cases]
        return 1 if any(codes) else 0
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    shape, gib, *rest = arguments.cases[0].split(":")
    with tempfile.TemporaryDirectory() as folder:
        result = measure(shape, float(gib), rest == ["full"], Path(folder))
    print(json.dumps(result), flush=True)
    if arguments.json:
        with arguments.json.open("a") as file:
            file.write(json.dumps(result) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
