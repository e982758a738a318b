"""Room for the model: GPUs enough for Prime-RL, and memory on either engine."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import psutil

from harbortrainer.config.preflight.facts import Facts
from harbortrainer.config.preflight.finding import Finding, green, red, yellow
from harbortrainer.config.preflight.model import snapshot

INFERENCE_BYTES = 2.4
"""Bytes a parameter while sampling: bf16 weights, and a fifth more so that some context fits."""

TRAINING_BYTES = {"float32": 4.4, "bfloat16": 2.4}
"""Bytes a parameter while a LoRA trains: the frozen weights, and some for activations; shared by the GPUs."""

EMBEDDED_BYTES = {"GPU": 4.8, "CPU": 8.8}
"""Bytes a parameter on the embedded engine, which holds the model twice: bf16 on a GPU, float32 on a CPU."""

USABLE = 0.9
MIB = 1024**2
GIB = 1024**3


def check(facts: Facts) -> Iterator[Finding]:
    """Count, then memory."""
    if facts.get("slurm") is not None or facts.raw is None:
        return
    if not facts.prime_rl:
        yield from embedded(facts)
        return
    sampling = int(facts.get("deployment.num_infer_gpus", 1)) if facts.get("inference") is not None else 0
    training = int(facts.get("deployment.num_train_gpus", 1))
    if len(facts.gpus) < sampling + training:
        what = f"{sampling} for sampling and {training} for training are asked for, {len(facts.gpus)} are there"
        yield red("GPUs", what, "lower [deployment], or use --engine local")
        return
    yield green("GPUs", ", ".join(f"{gpu.name} {gpu.memory_mib // 1024} GiB" for gpu in facts.gpus))
    yield memory(facts, sampling, training)


def embedded(facts: Facts) -> Iterator[Finding]:
    """The embedded engine on the first GPU, else in this machine's memory."""
    size = None if facts.get("warmup") is not None else parameters(facts.model)
    if size is None:
        return
    device = "GPU" if facts.gpus else "CPU"
    room = facts.gpus[0].memory_mib * MIB if facts.gpus else psutil.virtual_memory().total
    needed = size * EMBEDDED_BYTES[device]
    what = f"{facts.model} needs about {needed / GIB:.1f} GiB on the {device}, {room * USABLE / GIB:.1f} can be used"
    if needed > room * USABLE:
        yield red("memory", what, "use a smaller model, or Prime-RL (docs/sizing.md)")
    else:
        yield green("memory", what)


def memory(facts: Facts, sampling: int, training: int) -> Finding:
    """A rough bound, by the number of parameters."""
    size = parameters(facts.model)
    if size is None:
        return yellow("GPU memory", f"the size of {facts.model} is not known here", "see docs/sizing.md")
    smallest = min(gpu.memory_mib for gpu in facts.gpus) * MIB * USABLE
    kind = str(facts.get("trainer.model.optimization_dtype", "float32"))
    shards = int(facts.get("inference.vllm.tensor_parallel_size", 1))
    needs = {
        "sampling": size * INFERENCE_BYTES / shards if sampling else 0.0,
        "training": size * TRAINING_BYTES.get(kind, 4.4) / training,
    }
    for what, bytes_needed in needs.items():
        if bytes_needed > smallest:
            said = f"{what} needs about {bytes_needed / GIB:.0f} GiB a GPU, {smallest / GIB:.0f} can be used"
            return red("GPU memory", said, "use a smaller model or more GPUs (docs/sizing.md)")
    return green("GPU memory", f"about {max(needs.values()) / GIB:.0f} GiB a GPU are needed at least")


def parameters(model: str) -> float | None:
    """How many parameters a model has: by its weights when they are here, else by its name (`Qwen3-8B`)."""
    folders = [Path(model), *snapshot(model).glob("*")] if "/" in model else [Path(model)]
    for folder in folders:
        index = folder / "model.safetensors.index.json"
        if index.is_file():
            return json.loads(index.read_text())["metadata"]["total_size"] / 2
        if weights := list(folder.glob("*.safetensors")):
            return sum(file.stat().st_size for file in weights) / 2
    named = re.search(r"(?<![\w.])(\d+(?:\.\d+)?)([BM])(?![A-Za-z])", Path(model).name)
    return float(named[1]) * (1e9 if named[2] == "B" else 1e6) if named else None
