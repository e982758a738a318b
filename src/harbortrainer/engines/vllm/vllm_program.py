"""The `vllm` program: where it is, which release it is, and the words that start its server.

Nothing of vLLM is imported: it pins a torch of its own, and is best installed where nothing else is.
"""

import os
import re
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from harbortrainer.engines.programs import output_of
from harbortrainer.errors import UserError

OLDEST = (0, 26)
"""What Prime-RL runs at the pin. Its sources are what this was written by: ids in and ids out with their
log-probabilities at /inference/v1/generate, those of the prompt too, and adapters that are loaded while it serves."""

KEY = "inference.engine"
LORA_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""What `--max-lora-rank` may be."""

VARIABLES = {
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True",
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    "VLLM_NO_USAGE_STATS": "1",
    "PYTHONUNBUFFERED": "1",
}


@dataclass(frozen=True, kw_only=True)
class ServeSettings:
    """What `vllm serve` is told.

    Args:
        model: A folder or a hub id; also the name under which the base is asked for.
        socket: A path of at most 107 characters: it listens on no port, so that nobody but this user reaches it.
        dtype: The learner's.
        max_model_len: Most tokens of prompt and answer.
        memory_share: Of the card, for weights, cache and all.
        lora_rank: The adapters'.
    """

    model: str
    socket: Path
    dtype: str
    max_model_len: int
    memory_share: float
    lora_rank: int
    seed: int = 0

    def words(self, program: str) -> list[str]:
        """The command."""
        options: dict[str, object] = {
            "uds": self.socket,
            "dtype": self.dtype,
            "max-model-len": self.max_model_len,
            "gpu-memory-utilization": self.memory_share,
            "seed": self.seed,
            "max-lora-rank": served_rank(self.lora_rank),
            # Requests of the version before go on beside those of the newest.
            "max-loras": 2,
            "max-cpu-loras": 8,
            # Of the distribution that the token was drawn from, and not of one before the temperature.
            "logprobs-mode": "processed_logprobs",
            # Nothing of the model's own sampling settings: a request says all of them.
            "generation-config": "vllm",
            "uvicorn-log-level": "warning",
        }
        return [program, "serve", self.model, "--enable-lora", *_spelled(options)]


def served_rank(rank: int) -> int:
    """The least `--max-lora-rank` that takes adapters of this rank.

    Raises:
        UserError: There is none.
    """
    for taken in LORA_RANKS:
        if rank <= taken:
            return taken
    what = f"vLLM serves no adapter of rank {rank}"
    raise UserError(what, where="trainer.model.lora.rank", do=f"set it to {LORA_RANKS[-1]} or less")


def find_vllm() -> str:
    """The program: on the PATH, else beside this Python.

    Raises:
        UserError: There is none.
    """
    places = os.pathsep.join([os.environ.get("PATH", os.defpath), str(Path(sys.executable).parent)])
    found = shutil.which("vllm", path=places)
    if found is None:
        do = f"install vLLM {_dotted(OLDEST)} or later so that `vllm` is on the PATH, or leave the key out"
        raise UserError("there is no program `vllm`", where=KEY, do=do)
    return found


def need_vllm() -> str:
    """The release of the program, which is new enough.

    Raises:
        UserError: There is none, it does not say which it is, or it is too old.
    """
    program = find_vllm()
    said = output_of(program, "--version", timeout_s=180) or ""
    release = re.search(r"^v?(\d+)\.(\d+)\S*", said.strip(), re.MULTILINE)
    if release is None:
        do = "run that command to see why"
        raise UserError(f"`{program} --version` names no release", where=KEY, do=do)
    if (int(release[1]), int(release[2])) < OLDEST:
        what = f"vLLM {release[0]} is too old: it does not give and take token ids as this engine needs"
        raise UserError(what, where=KEY, do=f"install vLLM {_dotted(OLDEST)} or later")
    return release[0]


def _spelled(options: dict[str, object]) -> Sequence[str]:
    return [word for name, value in options.items() for word in (f"--{name}", str(value))]


def _dotted(release: Sequence[int]) -> str:
    return ".".join(map(str, release))
