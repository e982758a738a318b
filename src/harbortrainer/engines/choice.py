"""Which engine runs: Prime-RL where it can, else the embedded one, and why.

Contract: nothing but looking; GPUs are counted with `nvidia-smi`, so that torch need not be imported.
"""

import os
import shutil
import subprocess
from dataclasses import dataclass
from typing import Literal

from harbortrainer.engines.prime_rl.place import Place
from harbortrainer.errors import UserError

Engine = Literal["prime-rl", "local"]
ENGINES = ("auto", "prime-rl", "local")
GPUS_NEEDED = 2
"""Prime-RL wants distinct GPUs for sampling and training."""


@dataclass(frozen=True)
class Gpu:
    """One GPU: its name and its memory in MiB."""

    name: str
    memory_mib: int


@dataclass(frozen=True)
class Choice:
    """An engine and the reason for it."""

    engine: Engine
    why: str


def choose(asked: str, place: Place, gpus: list[Gpu], *, warmup: bool = False, cluster: bool = False) -> Choice:
    """The engine that runs.

    Args:
        asked: "auto", "prime-rl" or "local".
        place: Where Prime-RL should be.
        gpus: The GPUs of this machine.
        warmup: The run file has `[warmup]`, which the embedded engine alone does.
        cluster: The run file has `[slurm]`: the GPUs are elsewhere.

    Raises:
        UserError: No such engine.
    """
    if asked not in ENGINES:
        raise UserError(f"no engine {asked!r}", where="--engine", do=f"choose {', '.join(ENGINES)}")
    if asked == "prime-rl":
        return Choice("prime-rl", "asked for")
    if asked == "local":
        return Choice("local", "asked for")
    if warmup:
        return Choice("local", "the run file has [warmup]")
    if not place.populated:
        return Choice("local", f"the submodule {place.root.name}/ is empty")
    if not place.installed:
        return Choice("local", f"Prime-RL's environment is not there ({place.environment})")
    if cluster:
        return Choice("prime-rl", "its environment is there and the run file has [slurm]")
    if len(gpus) < GPUS_NEEDED:
        return Choice("local", f"Prime-RL needs {GPUS_NEEDED} GPUs and there {_are(len(gpus))}")
    return Choice("prime-rl", f"its environment is there and {len(gpus)} GPUs are")


def find_gpus() -> list[Gpu]:
    """The NVIDIA GPUs that `CUDA_VISIBLE_DEVICES` leaves visible."""
    if shutil.which("nvidia-smi") is None:
        return []
    query = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=20, check=False)
    except subprocess.TimeoutExpired:
        return []
    rows = [line.rsplit(",", 1) for line in done.stdout.splitlines() if "," in line] if done.returncode == 0 else []
    gpus = [Gpu(name.strip(), int(memory)) for name, memory in rows if memory.strip().isdigit()]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return gpus
    return gpus[: len([device for device in visible.split(",") if device.strip() not in ("", "-1")])]


def _are(count: int) -> str:
    return "are none" if count == 0 else f"is {count}"
