"""Which engine runs: Prime-RL where it can, else the embedded one, and why.

Contract: nothing but looking; GPUs are counted with `nvidia-smi`, so that torch need not be imported.
"""

import os
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Literal

from harbortrainer.engines.prime_rl.checkout import Checkout
from harbortrainer.engines.programs import output_of
from harbortrainer.errors import UserError

Engine = Literal["prime-rl", "local"]
ENGINES = ("auto", "prime-rl", "local")
GPUS_NEEDED = 2
"""Prime-RL wants distinct GPUs for sampling and training."""
QUANTIZATION = "model.quantization"
LORA_INSTEAD = "add it, empty, to train a LoRA instead of every weight"
"""What to do with `trainer.model.lora` where every weight has no room."""

USABLE = 0.9
"""Of a device's memory, for what is planned; the rest is for buffers, and for holes in its heap."""


@dataclass(frozen=True)
class Gpu:
    """One GPU: its name and its memory in MiB."""

    name: str
    memory_mib: int


@dataclass(frozen=True)
class EngineChoice:
    """An engine and the reason for it."""

    engine: Engine
    why: str


def choose(
    asked: str, checkout: Checkout, gpus: list[Gpu], *, warmup: bool = False, cluster: bool = False
) -> EngineChoice:
    """The engine that runs.

    Args:
        asked: "auto", "prime-rl" or "local".
        checkout: Where Prime-RL should be.
        gpus: The GPUs of this machine.
        warmup: The run file has `[warmup]`, which the embedded engine alone does.
        cluster: The run file has `[slurm]`: the GPUs are elsewhere.

    Raises:
        UserError: No such engine.
    """
    if asked not in ENGINES:
        raise UserError(f"no engine {asked!r}", where="--engine", do=f"choose {', '.join(ENGINES)}")
    if asked == "prime-rl" or asked == "local":
        return EngineChoice(asked, "asked for")
    if warmup:
        return EngineChoice("local", "the run file has [warmup]")
    if not checkout.populated:
        return EngineChoice("local", f"the submodule {checkout.root.name}/ is empty")
    if not checkout.installed:
        return EngineChoice("local", f"Prime-RL's environment is not there ({checkout.environment})")
    if cluster:
        return EngineChoice("prime-rl", "its environment is there and the run file has [slurm]")
    if len(gpus) < GPUS_NEEDED:
        return EngineChoice("local", f"Prime-RL needs {GPUS_NEEDED} GPUs and there {_are(len(gpus))}")
    return EngineChoice("prime-rl", f"its environment is there and {len(gpus)} GPUs are")


def find_gpus() -> list[Gpu]:
    """The NVIDIA GPUs that `CUDA_VISIBLE_DEVICES` leaves visible."""
    said = output_of("nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits") or ""
    rows = [line.rsplit(",", 1) for line in said.splitlines() if "," in line]
    gpus = [Gpu(name.strip(), int(memory)) for name, memory in rows if memory.strip().isdigit()]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return gpus
    return gpus[: len([device for device in visible.split(",") if device.strip() not in ("", "-1")])]


def _are(count: int) -> str:
    return "are none" if count == 0 else f"is {count}"


def need_extra(*modules: str) -> None:
    """The embedded engine's packages are an extra; the plugin installs without them.

    Raises:
        UserError: One is missing.
    """
    missing = [module for module in modules if find_spec(module) is None]
    if missing:
        do = "run `uv sync --extra local`, or `pip install 'harbortrainer[local]'`"
        raise UserError(f"not installed: {', '.join(missing)}", where="the embedded engine", do=do)


def need_bitsandbytes() -> None:
    """What a quantized base needs is an extra too; it is looked for, and not imported.

    Raises:
        UserError: It is missing.
    """
    if find_spec("bitsandbytes") is None:
        do = "run `uv sync --extra local --extra quantized`, `pip install 'harbortrainer[quantized]'`, or leave it out"
        raise UserError("not installed: bitsandbytes, which a quantized base needs", where=QUANTIZATION, do=do)
