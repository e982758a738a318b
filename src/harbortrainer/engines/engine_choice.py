"""Chooses the engine: Prime-RL if it can run here, else the embedded one.

Contract: read-only. GPUs are counted with `nvidia-smi`, so torch is not imported.
"""

import os
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Literal

from harbortrainer.engines.prime_rl.checkout import Checkout
from harbortrainer.engines.programs import program_output
from harbortrainer.errors import UserError, choice_advice

Engine = Literal["prime-rl", "local"]
ENGINES = ("auto", "prime-rl", "local")
GPUS_NEEDED = 2
"""Prime-RL needs separate GPUs for sampling and training."""
QUANTIZATION = "model.quantization"
LORA_ADVICE = "add it, empty, to train a LoRA instead of every weight"
"""Advice for `trainer.model.lora` if full fine-tuning does not fit into the memory."""

USABLE_SHARE = 0.9
"""Share of a device's memory that plans may use; the rest is for buffers and heap fragmentation."""


@dataclass(frozen=True)
class Gpu:
    """One GPU: its name and its memory in MiB."""

    name: str
    memory_mib: int


@dataclass(frozen=True)
class EngineChoice:
    """An engine and the reason for it."""

    engine: Engine
    reason: str


def choose(
    requested: str, checkout: Checkout, gpus: list[Gpu], *, warmup: bool = False, cluster: bool = False
) -> EngineChoice:
    """Choose the engine.

    Args:
        requested: "auto", "prime-rl" or "local".
        checkout: Where Prime-RL should be.
        gpus: The GPUs of this machine.
        warmup: The run file has `[warmup]`, which only the embedded engine supports.
        cluster: The run file has `[slurm]`, so the GPUs are on other machines.

    Raises:
        UserError: There is no such engine.
    """
    if requested not in ENGINES:
        raise UserError(f"unknown engine {requested!r}", where="--engine", do=choice_advice(requested, ENGINES))
    if requested == "prime-rl" or requested == "local":
        return EngineChoice(requested, "requested")
    if warmup:
        return EngineChoice("local", "the run file has [warmup]")
    if not checkout.populated:
        return EngineChoice("local", f"the submodule {checkout.root.name}/ is empty")
    if not checkout.installed:
        return EngineChoice("local", f"Prime-RL's environment is not installed ({checkout.environment})")
    if cluster:
        return EngineChoice("prime-rl", "it is installed and the run file has [slurm]")
    if len(gpus) < GPUS_NEEDED:
        return EngineChoice("local", f"Prime-RL needs {GPUS_NEEDED} GPUs; this machine has {len(gpus) or 'none'}")
    return EngineChoice("prime-rl", f"it is installed and this machine has {len(gpus)} GPUs")


def find_gpus() -> list[Gpu]:
    """Return the NVIDIA GPUs that `CUDA_VISIBLE_DEVICES` leaves visible."""
    output = program_output("nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits") or ""
    rows = [line.rsplit(",", 1) for line in output.splitlines() if "," in line]
    gpus = [Gpu(name.strip(), int(memory)) for name, memory in rows if memory.strip().isdigit()]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return gpus
    return gpus[: len([device for device in visible.split(",") if device.strip() not in ("", "-1")])]


def require_extra(*modules: str) -> None:
    """Check that the embedded engine's packages are installed; they are an optional extra.

    Raises:
        UserError: One is missing.
    """
    missing = [module for module in modules if find_spec(module) is None]
    if missing:
        do = "run `uv sync --extra local`, or `pip install 'harbortrainer[local]'`"
        raise UserError(f"not installed: {', '.join(missing)}", where="the embedded engine", do=do)


def require_bitsandbytes() -> None:
    """Check that bitsandbytes is installed, without importing it; it is an optional extra.

    Raises:
        UserError: It is missing.
    """
    if find_spec("bitsandbytes") is None:
        do = "run `uv sync --extra local --extra quantized`, `pip install 'harbortrainer[quantized]'`, or leave it out"
        raise UserError("not installed: bitsandbytes, which a quantized base needs", where=QUANTIZATION, do=do)
