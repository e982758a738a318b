"""GPUs for Prime-RL: enough of them, and memory for the model."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

from harbortrainer.config.preflight.facts import Facts
from harbortrainer.config.preflight.finding import Finding, green, red, yellow
from harbortrainer.config.preflight.model import snapshot

INFERENCE_BYTES = 2.4
"""Bytes a parameter while sampling: bf16 weights, and a fifth more so that some context fits."""

TRAINING_BYTES = {"float32": 4.4, "bfloat16": 2.4}
"""Bytes a parameter while a LoRA trains: the frozen weights, and some for activations; shared by the GPUs."""

USABLE = 0.9
MIB = 1024**2


def check(facts: Facts) -> Iterator[Finding]:
    """Count, then memory."""
    if not facts.prime_rl or facts.get("slurm") is not None:
        return
    sampling = int(facts.get("deployment.num_infer_gpus", 1)) if facts.get("inference") is not None else 0
    training = int(facts.get("deployment.num_train_gpus", 1))
    if len(facts.gpus) < sampling + training:
        what = f"{sampling} for sampling and {training} for training are asked for, {len(facts.gpus)} are there"
        yield red("GPUs", what, "lower [deployment], or use --engine local")
        return
    yield green("GPUs", ", ".join(f"{gpu.name} {gpu.memory_mib // 1024} GiB" for gpu in facts.gpus))
    yield memory(facts, sampling, training)


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
            said = f"{what} needs about {bytes_needed / 1024**3:.0f} GiB a GPU, {smallest / 1024**3:.0f} can be used"
            return red("GPU memory", said, "use a smaller model or more GPUs (docs/sizing.md)")
    return green("GPU memory", f"about {max(needs.values()) / 1024**3:.0f} GiB a GPU are needed at least")


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
