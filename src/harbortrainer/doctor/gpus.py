"""Room for the model: GPUs enough for Prime-RL, and memory on either engine."""

import json
import re
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path

from harbortrainer.config.prime_rl_run import PrimeRun
from harbortrainer.config.runfile import RunConfig
from harbortrainer.doctor.finding import Finding, green, red, yellow
from harbortrainer.doctor.launch_plan import LaunchPlan
from harbortrainer.engines.engine_choice import LORA_INSTEAD, USABLE
from harbortrainer.errors import UserError
from harbortrainer.runs.ingredients import hub_folder

INFERENCE_BYTES = 2.4
"""Bytes a parameter while sampling: bf16 weights, and a fifth more so that some context fits."""

TRAINING_BYTES = {"float32": 4.4, "bfloat16": 2.4}
"""Bytes a parameter while a LoRA trains: the frozen weights, and some for activations; shared by the GPUs."""

EMBEDDED_BYTES = {"GPU": 3.0, "CPU": 6.0}
"""Bytes a parameter on the embedded engine: the weights once (bf16 on a GPU, float32 on a CPU), and half as much again
for its cache and its activations."""

FULL_BYTES = {"GPU": 21.0, "CPU": 22.0}
"""The same where every weight is trained: two copies of the model, a gradient and AdamW's moments in float32, on a GPU
a float32 master too; on a CPU, beside these, `KEPT_BYTES` a version that is kept."""

KEPT_BYTES = 4.0
"""Of a version on a CPU."""

QUANTIZED_BYTES = {"int8": 1.0, "nf4": 0.6}
"""Bytes a parameter of a quantized base, in place of 2 on a GPU and 4 on a CPU."""

SMALL = 0.05
"""Share of the room below which a model is not worth counting."""

LIBRARIES = 1_100_000_000
"""Bytes of what the engine's process imports, and of its servers; on a CPU in the same memory."""

MIB = 1024**2
GIB = 1024**3


def check(plan: LaunchPlan) -> Iterator[Finding]:
    """Count, then memory."""
    run = plan.run
    if isinstance(run, RunConfig):
        yield from embedded(plan, run)
    elif run is not None and run.slurm is None:
        yield from prime_rl(plan, run)


def embedded(plan: LaunchPlan, run: RunConfig) -> Iterator[Finding]:
    """The embedded engine on the first GPU, else in this machine's memory: counted where the model's config is here and
    it is no small part of that, else a rule of thumb by its size. Counting takes seconds."""
    if run.warmup is not None:
        return
    if run.inference.engine == "vllm":
        yield from beside_vllm(plan, run)
        return
    import psutil

    room = int(USABLE * (plan.gpus[0].memory_mib * MIB if plan.gpus else psutil.virtual_memory().total))
    device = "GPU" if plan.gpus else "CPU"
    folders = [folder for folder in folders_of(run.model.name) if (folder / "config.json").is_file()]
    size = parameters(run.model.name)
    large = size is None or size * embedded_bytes(device, run) > SMALL * room
    found = counted(run, folders[0], device, room, plan.where) if large and folders and find_spec("torch") else None
    found = found or estimated(run, device, room, plan.where)
    if found is not None:
        yield found


def beside_vllm(plan: LaunchPlan, run: RunConfig) -> Iterator[Finding]:
    """Two copies of the weights on the first GPU, by a rule of thumb: vLLM's in its share, the learner's in the
    rest."""
    size = parameters(run.model.name)
    if size is None or not plan.gpus:
        return
    card, share = plan.gpus[0].memory_mib * MIB, run.inference.vllm_share
    rooms = {"vLLM": (INFERENCE_BYTES, share), "the learner": (TRAINING_BYTES["bfloat16"], USABLE - share)}
    for who, (needed, part) in rooms.items():
        if size * needed > part * card:
            what = f"{who} needs about {size * needed / GIB:.1f} GiB of the GPU and has {part * card / GIB:.1f}"
            do = "change vLLM's share, or use a smaller model or the embedded sampler, which needs no second copy"
            yield red("memory", what, do, plan.where("inference.vllm.gpu_memory_utilization"))
            return
    yield green("memory", f"{run.model.name} fits on the GPU twice, in vLLM's {share:.0%} and in the rest")


def counted(run: RunConfig, folder: Path, device: str, room: int, where: Callable[[str], str]) -> Finding | None:
    """What the embedded engine will hold, part by part; none where a model cannot be run without its weights."""
    from harbortrainer.engines.memory_count import plan_memory

    kind = {"GPU": "cuda", "CPU": "cpu"}[device]
    try:
        plan = plan_memory(
            folder,
            run.lora,
            kind=kind,
            room=room - (LIBRARIES if kind == "cpu" else 0),
            quantization=run.model.quantization,
            off_policy=run.orchestrator.max_off_policy_steps,
        )
    except UserError as error:
        return red("memory", error.what, error.do, where(error.where))
    except RuntimeError:
        return None
    what = f"{run.model.name} on the {device}: {plan.told(run.max_model_len, run.seq_len)}"
    refusal = plan.refusal(run.max_model_len, run.seq_len) or plan.host_refusal(host_room())
    return red("memory", what, refusal.do, where(refusal.where)) if refusal else green("memory", what)


def estimated(run: RunConfig, device: str, room: int, where: Callable[[str], str]) -> Finding | None:
    """By the number of parameters; none where that is not known."""
    size = parameters(run.model.name)
    if size is None:
        return None
    needed = size * embedded_bytes(device, run)
    what = f"{run.model.name} needs about {needed / GIB:.1f} GiB on the {device}, {room / GIB:.1f} can be used"
    if needed > room:
        if run.lora is None:
            return red("memory", what, LORA_INSTEAD, where("trainer.model.lora"))
        return red("memory", what, "use a smaller model, or Prime-RL (docs/sizing.md)", where("model.name"))
    return green("memory", what)


def host_room() -> int:
    """Bytes of this machine's memory that a run may take."""
    import psutil

    return int(USABLE * psutil.virtual_memory().total) - LIBRARIES


def embedded_bytes(device: str, run: RunConfig) -> float:
    """Bytes a parameter on the embedded engine: of a LoRA's two thirds are the weights, where those are as they are."""
    whole, quantization = EMBEDDED_BYTES[device], run.model.quantization
    if run.lora is None:
        kept = KEPT_BYTES * (run.orchestrator.max_off_policy_steps + 4) if device == "CPU" else 0.0
        return FULL_BYTES[device] + kept
    return whole if quantization is None else whole / 3 + QUANTIZED_BYTES[quantization]


def prime_rl(plan: LaunchPlan, run: PrimeRun) -> Iterator[Finding]:
    """Prime-RL wants GPUs of their own for sampling and for training."""
    sampling = run.deployment.num_infer_gpus if run.inference is not None else 0
    training = run.deployment.num_train_gpus
    if len(plan.gpus) < sampling + training:
        what = f"{sampling} for sampling and {training} for training are asked for, {len(plan.gpus)} are there"
        yield red("GPUs", what, "lower [deployment], or use --engine local", plan.where("deployment"))
        return
    yield green("GPUs", ", ".join(f"{gpu.name} {gpu.memory_mib // 1024} GiB" for gpu in plan.gpus))
    smallest = min((gpu.memory_mib for gpu in plan.gpus), default=0) * MIB * USABLE
    yield memory(run, smallest, sampling, training, plan.where("model.name"))


def memory(run: PrimeRun, smallest: float, sampling: int, training: int, where: str) -> Finding:
    """A rough bound, by the number of parameters, on the bytes that the smallest GPU can give."""
    size = parameters(run.model.name)
    if size is None:
        return yellow("GPU memory", f"the size of {run.model.name} is not known here", "see docs/sizing.md", where)
    shards = run.inference.vllm.tensor_parallel_size if run.inference else 1
    needs = {
        "sampling": size * INFERENCE_BYTES / shards if sampling else 0.0,
        "training": size * TRAINING_BYTES[run.trainer.model.optimization_dtype] / max(training, 1),
    }
    for what, bytes_needed in needs.items():
        if bytes_needed > smallest:
            said = f"{what} needs about {bytes_needed / GIB:.0f} GiB a GPU, {smallest / GIB:.0f} can be used"
            return red("GPU memory", said, "use a smaller model or more GPUs (docs/sizing.md)", where)
    return green("GPU memory", f"about {max(needs.values()) / GIB:.0f} GiB a GPU are needed at least")


def folders_of(model: str) -> list[Path]:
    """Where a model's files may be: its folder, or the hub's cache."""
    return [Path(model), *hub_folder(model).glob("snapshots/*")] if "/" in model else [Path(model)]


def parameters(model: str) -> float | None:
    """How many parameters a model has: by its weights when they are here, else by its name (`Qwen3-8B`)."""
    for folder in folders_of(model):
        index = folder / "model.safetensors.index.json"
        if index.is_file():
            return json.loads(index.read_text())["metadata"]["total_size"] / 2
        if weights := list(folder.glob("*.safetensors")):
            return sum(file.stat().st_size for file in weights) / 2
    named = re.search(r"(?<![\w.])(\d+(?:\.\d+)?)([BM])(?![A-Za-z])", Path(model).name)
    return float(named[1]) * (1e9 if named[2] == "B" else 1e6) if named else None
