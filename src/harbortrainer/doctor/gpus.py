"""Checks of GPUs and memory: enough GPUs for Prime-RL, enough memory for the model on either engine."""

import json
import re
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

from harbortrainer.config.prime_rl_run import PrimeRun
from harbortrainer.config.runfile import Quantization, RunConfig
from harbortrainer.config.trainer_table import LoraSettings
from harbortrainer.doctor.finding import Finding, green, red, yellow
from harbortrainer.doctor.launch_plan import LaunchPlan
from harbortrainer.engines.engine_choice import LORA_ADVICE, USABLE_SHARE, Gpu
from harbortrainer.errors import UserError
from harbortrainer.runs.provenance import hub_folder

if TYPE_CHECKING:
    from harbortrainer.engines.memory_plan import MemoryPlan

INFERENCE_BYTES = 2.4
"""Bytes per parameter for sampling: bf16 weights, and 20 % more for the KV cache."""

TRAINING_BYTES = {"float32": 4.4, "bfloat16": 2.4}
"""Bytes per parameter for training a LoRA: frozen weights and some activations, sharded over the GPUs."""

EMBEDDED_BYTES = {"GPU": 3.0, "CPU": 6.0}
"""Bytes per parameter on the embedded engine, for a LoRA. The weights are held once, in bf16 on a GPU and in float32 on
a CPU. KV cache and activations take half as much again."""

FULL_BYTES = {"GPU": 21.0, "CPU": 22.0}
"""The same for full fine-tuning: two copies of the model, and gradient and AdamW moments in float32. A GPU also holds a
float32 master copy; a CPU also holds `VERSION_BYTES` per kept policy version."""

VERSION_BYTES = 4.0
"""Bytes per parameter of a kept policy version on a CPU."""

QUANTIZED_BYTES = {"int8": 1.0, "nf4": 0.6}
"""Bytes per parameter of a quantized base, instead of 2 on a GPU and 4 on a CPU."""

SMALL = 0.05
"""Share of the memory below which a model is estimated instead of counted."""

LIBRARIES = 1_100_000_000
"""Bytes of the engine's imported libraries and its servers. On a CPU they share the model's memory."""

MIB = 1024**2
GIB = 1024**3


def check(plan: LaunchPlan) -> Iterator[Finding]:
    """Check the number of GPUs and the memory."""
    run = plan.run
    if isinstance(run, RunConfig):
        yield from embedded(plan, run)
    elif run is not None and run.slurm is None:
        yield from prime_rl(plan, run)


def embedded(plan: LaunchPlan, run: RunConfig) -> Iterator[Finding]:
    """Check the memory of the embedded engine, on the first GPU or else on the CPU.

    A large model whose config is on this machine is counted exactly, which takes seconds. Any other is estimated.
    """
    if run.warmup is not None:
        if run.warmup.model is None:  # a family makes a small model of its own
            return
        # The policy will have the shape of the model that the warm-up starts from.
        run = run.model_copy(update={"model": run.model.model_copy(update={"name": run.warmup.model})})

    def where(key: str) -> str:
        return plan.where("warmup.model" if key == "model.name" and run.warmup is not None else key)

    if run.inference.engine == "vllm":
        yield from beside_vllm(plan, run)
        return
    device, room = usable_memory(plan.gpus)
    folders = config_folders(run.model.name)
    size = parameters(run.model.name)
    large = size is None or size * embedded_bytes(device, run) > SMALL * room
    found = counted(run, folders[0], device, room, where) if large and folders and find_spec("torch") else None
    found = found or estimated(run, device, room, where)
    if found is not None:
        yield found


def usable_memory(gpus: Sequence[Gpu]) -> tuple[str, int]:
    """Return the device of the embedded engine, "GPU" or "CPU", and the bytes of its memory that a run can use."""
    import psutil

    total = gpus[0].memory_mib * MIB if gpus else psutil.virtual_memory().total
    return "GPU" if gpus else "CPU", int(USABLE_SHARE * total)


def beside_vllm(plan: LaunchPlan, run: RunConfig) -> Iterator[Finding]:
    """Estimate the memory of vLLM and the learner on the first GPU: each holds a copy of the weights."""
    size = parameters(run.model.name)
    if size is None or not plan.gpus:
        return
    card, share = plan.gpus[0].memory_mib * MIB, run.inference.vllm_share
    needs = {"vLLM": (INFERENCE_BYTES, share), "the learner": (TRAINING_BYTES["bfloat16"], USABLE_SHARE - share)}
    for who, (needed, part) in needs.items():
        if size * needed > part * card:
            what = f"{who} needs about {size * needed / GIB:.1f} GiB, but has {part * card / GIB:.1f} GiB"
            do = "change vLLM's share, use a smaller model, or use the embedded sampler, which shares the weights"
            yield red("memory", what, do, plan.where("inference.vllm.gpu_memory_utilization"))
            return
    yield green("memory", f"{run.model.name} fits in vLLM's share of the GPU ({share:.0%}) and in the rest")


def counted(run: RunConfig, folder: Path, device: str, room: int, where: Callable[[str], str]) -> Finding | None:
    """Count the memory of the embedded engine; None if the model cannot be built without its weights."""
    try:
        plan = memory_plan(
            folder,
            run.lora,
            device,
            room,
            run.model.quantization,
            run.orchestrator.max_off_policy_steps,
            run.inference.vllm.dtype,
        )
    except UserError as error:
        return red("memory", error.what, error.do, where(error.where))
    if plan is None:
        return None
    what = f"{run.model.name} on the {device}: {plan.summary(run.max_model_len, run.seq_len)}"
    refusal = plan.memory_error(run.max_model_len, run.seq_len) or plan.host_memory_error(host_room())
    return red("memory", what, refusal.do, where(refusal.where)) if refusal else green("memory", what)


def memory_plan(
    folder: Path,
    lora: LoraSettings | None,
    device: str,
    room: int,
    quantization: Quantization | None = None,
    off_policy: int = 8,
    dtype: str = "auto",
) -> "MemoryPlan | None":
    """Plan the memory of the embedded engine; None if the model cannot be built without its weights.

    Args:
        folder: The model's folder, with its config.
        lora: None for full fine-tuning.
        device: "GPU" or "CPU".
        room: Usable bytes of the device, as `usable_memory` returns them.
        quantization: Of the base.
        off_policy: `max_off_policy_steps`.
        dtype: Of the base, as `inference.vllm.dtype`.

    Raises:
        UserError: As `plan_memory`.
    """
    from harbortrainer.engines.memory_count import plan_memory

    kind = {"GPU": "cuda", "CPU": "cpu"}[device]
    capacity = room - (LIBRARIES if kind == "cpu" else 0)
    try:
        return plan_memory(
            folder,
            lora,
            device_type=kind,
            capacity=capacity,
            quantization=quantization,
            off_policy=off_policy,
            dtype=dtype,
        )
    except RuntimeError:
        return None


def estimated(run: RunConfig, device: str, room: int, where: Callable[[str], str]) -> Finding | None:
    """Estimate the memory by the number of parameters; None if that is unknown."""
    size = parameters(run.model.name)
    if size is None:
        return None
    needed = size * embedded_bytes(device, run)
    amount = f"{needed / GIB:.1f} GiB" if needed > GIB else f"{needed / MIB:.0f} MiB"
    need = f"needs about {amount} on the {device}, estimated by its number of parameters"
    what = f"{run.model.name} {need}; {room / GIB:.1f} GiB are usable"
    if needed > room:
        if run.lora is None:
            return red("memory", what, LORA_ADVICE, where("trainer.model.lora"))
        return red("memory", what, "use a smaller model, or Prime-RL (docs/sizing.md)", where("model.name"))
    return green("memory", what)


def host_room() -> int:
    """Bytes of this machine's memory that a run can use."""
    import psutil

    return int(USABLE_SHARE * psutil.virtual_memory().total) - LIBRARIES


def embedded_bytes(device: str, run: RunConfig) -> float:
    """Bytes per parameter on the embedded engine. Of an unquantized LoRA run, two thirds are the weights."""
    sized_as = {"auto": device, "bfloat16": "GPU", "float32": "CPU"}[run.inference.vllm.dtype]
    whole, quantization = EMBEDDED_BYTES[sized_as], run.model.quantization
    if run.lora is None:
        kept = VERSION_BYTES * (run.orchestrator.max_off_policy_steps + 4) if device == "CPU" else 0.0
        return FULL_BYTES[device] + kept
    return whole if quantization is None else whole / 3 + QUANTIZED_BYTES[quantization]


def prime_rl(plan: LaunchPlan, run: PrimeRun) -> Iterator[Finding]:
    """Check the GPUs of Prime-RL, which needs separate ones for sampling and training."""
    sampling = run.deployment.num_infer_gpus if run.inference is not None else 0
    training = run.deployment.num_train_gpus
    if len(plan.gpus) < sampling + training:
        what = f"the run needs {sampling} for sampling and {training} for training; this machine has {len(plan.gpus)}"
        yield red("GPUs", what, "lower the numbers in [deployment], or use --engine local", plan.where("deployment"))
        return
    yield green("GPUs", ", ".join(f"{gpu.name} {gpu.memory_mib // 1024} GiB" for gpu in plan.gpus))
    smallest = min((gpu.memory_mib for gpu in plan.gpus), default=0) * MIB * USABLE_SHARE
    yield memory(run, smallest, sampling, training, plan.where("model.name"))


def memory(run: PrimeRun, smallest: float, sampling: int, training: int, where: str) -> Finding:
    """Estimate whether the model fits on the smallest GPU, by its number of parameters."""
    size = parameters(run.model.name)
    if size is None:
        return yellow("GPU memory", f"the size of {run.model.name} is unknown", "see docs/sizing.md", where)
    shards = run.inference.vllm.tensor_parallel_size if run.inference else 1
    needs = {
        "sampling": size * INFERENCE_BYTES / shards if sampling else 0.0,
        "training": size * TRAINING_BYTES[run.trainer.model.optimization_dtype] / max(training, 1),
    }
    for what, bytes_needed in needs.items():
        if bytes_needed > smallest:
            shortage = f"{what} needs about {bytes_needed / GIB:.0f} GiB per GPU; {smallest / GIB:.0f} GiB are usable"
            return red("GPU memory", shortage, "use a smaller model or more GPUs (docs/sizing.md)", where)
    return green("GPU memory", f"needs at least about {max(needs.values()) / GIB:.0f} GiB per GPU")


def folders_of(model: str) -> list[Path]:
    """Return folders that may hold a model's files: its own folder, or its snapshots in the hub cache."""
    return [Path(model), *hub_folder(model).glob("snapshots/*")] if "/" in model else [Path(model)]


def config_folders(model: str) -> list[Path]:
    """Return the folders on this machine that hold the model's config."""
    return [folder for folder in folders_of(model) if (folder / "config.json").is_file()]


def _elements(file: Path) -> int:
    """Number of elements of all tensors in a safetensors file, by its header. 0 if it cannot be read."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="numpy") as tensors:
            return sum(prod(tensors.get_slice(name).get_shape()) for name in tensors.keys())  # noqa: SIM118 (no mapping)
    except (OSError, SafetensorError):
        return 0


def parameters(model: str) -> float | None:
    """Number of parameters of a model, by its weights if they are on this machine, else by its name (`Qwen3-8B`)."""
    for folder in folders_of(model):
        index = folder / "model.safetensors.index.json"
        if index.is_file():
            # The shards may not be downloaded yet. Older indexes have only the bytes; 2 a parameter are assumed.
            metadata = json.loads(index.read_text())["metadata"]
            return float(metadata.get("total_parameters") or metadata["total_size"] / 2)
        if counted := sum(map(_elements, folder.glob("*.safetensors"))):
            return float(counted)
    named = re.search(r"(?<![\w.])(\d+(?:\.\d+)?)([BM])(?![A-Za-z])", Path(model).name)
    return float(named[1]) * (1e9 if named[2] == "B" else 1e6) if named else None
