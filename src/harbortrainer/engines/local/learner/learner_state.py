"""The learner on disk: the adapter as peft writes it, and beside it what is needed to go on exactly.

    adapter_config.json, adapter_model.safetensors    `peft.PeftModel.from_pretrained(base, folder)` loads them
    learner.pt                                        format, version, optimizer, random state

A folder is written under another name and renamed, so it is complete or not there (`runs/durable.py`).
"""

import io
import os
import pickle
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from harbortrainer.engines.local.learner.lora_policy import AdapterWeights, LoraPolicy
from harbortrainer.errors import UserError
from harbortrainer.runs.durable import atomic_folder

FORMAT = 1
STATE_FILE = "learner.pt"
ADAPTER_FILE = "adapter_model.safetensors"
DAMAGED = (RuntimeError, OSError, EOFError, pickle.UnpicklingError, SafetensorError)
"""What torch and safetensors raise on a file that is cut or overwritten."""


@dataclass(frozen=True, slots=True)
class LearnerState:
    """What a checkpoint holds beside the adapter."""

    version: int
    optimizer: dict[str, object]
    rng: list[torch.Tensor]
    """torch's random state: the CPU's, then each GPU's."""

    @classmethod
    def now(cls, version: int, optimizer: torch.optim.Optimizer) -> Self:
        """The state of this moment."""
        gpus = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
        return cls(version, optimizer.state_dict(), [torch.get_rng_state(), *gpus])

    def restore(self, optimizer: torch.optim.Optimizer) -> None:
        """Put optimizer and random state back; GPUs that are not there any more are left out."""
        optimizer.load_state_dict(self.optimizer)
        torch.set_rng_state(self.rng[0])
        if torch.cuda.is_available():
            for index, rng in enumerate(self.rng[1 : 1 + torch.cuda.device_count()]):
                torch.cuda.set_rng_state(rng, index)


def save_learner(folder: Path, policy: LoraPolicy, state: LearnerState) -> None:
    """Write a checkpoint; an older one of that name is replaced, at no moment is there half of one."""
    with atomic_folder(folder) as fresh:
        try:
            policy.write_adapter(fresh)
        except SafetensorError as error:
            raise as_disk_error(error, fresh) from error
        content = {"format": FORMAT, "version": state.version, "optimizer": state.optimizer, "rng": state.rng}
        # By way of memory, since torch tells of a full disk as it does of a defect.
        buffer = io.BytesIO()
        torch.save(content, buffer)
        (fresh / STATE_FILE).write_bytes(buffer.getbuffer())


def as_disk_error(error: SafetensorError, folder: Path) -> Exception:
    """What safetensors raises when it cannot write, as the error of the operating system that it was."""
    code = re.search(r"os error (\d+)", str(error))
    return OSError(int(code[1]), os.strerror(int(code[1])), str(folder)) if code else error


def load_learner(folder: Path, policy: LoraPolicy) -> LearnerState:
    """Put a checkpoint's adapter into the policy and read the rest.

    Raises:
        UserError: The folder is no checkpoint of this program, damaged, or of another model. Nothing has changed then.
    """
    adapter, state = _read(folder)
    try:
        policy.set_adapter(adapter)
    except (ValueError, RuntimeError) as error:
        raise UserError(
            "the checkpoint was made for another model or other [trainer.model.lora] keys",
            where=str(folder),
            do="resume with the config it was started with",
        ) from error
    return state


def _read(folder: Path) -> tuple[AdapterWeights, LearnerState]:
    try:
        content = torch.load(folder / STATE_FILE, map_location="cpu", weights_only=True)
        adapter = load_file(folder / ADAPTER_FILE)
    except FileNotFoundError as error:
        raise UserError("not a checkpoint of the learner", where=str(folder), do="name another folder") from error
    except DAMAGED as error:
        raise UserError(f"damaged checkpoint ({error})", where=str(folder), do="resume from an older one") from error
    if content.get("format") != FORMAT:
        what = f"checkpoint format {content.get('format')}"
        raise UserError(what, where=str(folder), do="use the version that wrote it")
    return adapter, LearnerState(version=content["version"], optimizer=content["optimizer"], rng=content["rng"])
