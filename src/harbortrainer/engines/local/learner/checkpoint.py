"""The learner on disk: the adapter as peft writes it, and beside it what is needed to go on exactly.

    adapter_config.json, adapter_model.safetensors    `peft.PeftModel.from_pretrained(base, folder)` loads
    them learner.pt                                        format, version, optimizer, random state

A folder is written under another name and renamed, so it is complete or not there (`folder.py`).
"""

import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from harbortrainer.engines.local.learner.folder import atomic_folder
from harbortrainer.engines.local.learner.policy import Adapter, Policy
from harbortrainer.errors import UserError

FORMAT = 1
STATE_FILE = "learner.pt"
ADAPTER_FILE = "adapter_model.safetensors"
DAMAGED = (RuntimeError, OSError, EOFError, pickle.UnpicklingError, SafetensorError)
"""What torch and safetensors raise on a file that is cut or overwritten."""


@dataclass(frozen=True, slots=True)
class State:
    """What a checkpoint holds beside the adapter."""

    version: int
    optimizer: dict[str, Any]
    rng: list[torch.Tensor]


def write_adapter(policy: Policy, folder: Path) -> None:
    """Write the current adapter in peft's plain format into an existing or new folder."""
    policy.model.save_pretrained(str(folder), save_embedding_layers=False)


def save(folder: Path, policy: Policy, state: State) -> None:
    """Write a checkpoint; an older one of that name is replaced, at no moment is there half of one."""
    with atomic_folder(folder) as fresh:
        write_adapter(policy, fresh)
        content = {"format": FORMAT, "version": state.version, "optimizer": state.optimizer, "rng": state.rng}
        torch.save(content, fresh / STATE_FILE)


def load(folder: Path) -> tuple[Adapter, State]:
    """Read a checkpoint.

    Raises:
        UserError: The folder is no checkpoint of this program, or damaged.
    """
    try:
        content = torch.load(folder / STATE_FILE, map_location="cpu", weights_only=True)
        adapter = load_file(folder / ADAPTER_FILE)
    except FileNotFoundError as error:
        raise UserError("not a checkpoint of the learner", where=str(folder), do="name another folder") from error
    except DAMAGED as error:
        raise UserError(f"damaged checkpoint ({error})", where=str(folder), do="resume from an older one") from error
    if content.get("format") != FORMAT:
        raise UserError(
            f"checkpoint format {content.get('format')}",
            where=str(folder),
            do="use the version that wrote it",
        )
    return adapter, State(version=content["version"], optimizer=content["optimizer"], rng=content["rng"])


def put(policy: Policy, adapter: Adapter, folder: Path) -> None:
    """Put a checkpoint's adapter into the policy, or raise UserError when it was made for another model."""
    try:
        policy.set_adapter(adapter)
    except (ValueError, RuntimeError) as error:
        raise UserError(
            "the checkpoint was made for another model or other [trainer.model.lora] keys",
            where=str(folder),
            do="resume with the config it was started with",
        ) from error


def random_state() -> list[torch.Tensor]:
    """torch's random state: the CPU's, then each GPU's."""
    return [torch.get_rng_state(), *(torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [])]


def set_random_state(state: list[torch.Tensor]) -> None:
    """Put torch's random state back; GPUs that are not there any more are left out."""
    torch.set_rng_state(state[0])
    if torch.cuda.is_available():
        for index, rng in enumerate(state[1 : 1 + torch.cuda.device_count()]):
            torch.cuda.set_rng_state(rng, index)
