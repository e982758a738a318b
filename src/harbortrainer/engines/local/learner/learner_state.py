"""The learner's checkpoint: its policy in a standard format, and the state that an exact resume needs.

    adapter_config.json, adapter_model.safetensors    `peft.PeftModel.from_pretrained(base, folder)` loads them
    or config.json, model*.safetensors, tokenizer     `AutoModelForCausalLM.from_pretrained(folder)` loads them
    learner.pt                                        format, version, optimizer, random state, float32 weights

Writes are atomic: a folder is written under another name and renamed (`runs/durable.py`).
"""

import os
import pickle
import re
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Self

import torch
from safetensors import SafetensorError

from harbortrainer.engines.local.learner.trained_policy import PolicyWeights, TrainedPolicy
from harbortrainer.errors import UserError
from harbortrainer.runs.durable import atomic_folder

FORMAT = 1
STATE_FILE = "learner.pt"
DAMAGED = (RuntimeError, OSError, EOFError, pickle.UnpicklingError, SafetensorError)
"""Errors of torch and safetensors for a truncated or overwritten file."""


@dataclass(frozen=True, slots=True)
class LearnerState:
    """Content of a checkpoint besides the policy."""

    version: int
    optimizer: dict[str, object]
    rng: list[torch.Tensor]
    """torch's random states: the CPU's, then each GPU's."""
    masters: PolicyWeights = field(default_factory=dict)
    """Float32 master weights, if the policy computes in another dtype."""

    @classmethod
    def now(cls, version: int, optimizer: torch.optim.Optimizer, policy: TrainedPolicy) -> Self:
        """Return the current state."""
        gpus = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
        return cls(version, optimizer.state_dict(), [torch.get_rng_state(), *gpus], policy.master_weights())

    def restore(self, optimizer: torch.optim.Optimizer) -> None:
        """Restore everything except the policy's weights; GPUs that are missing now are left out."""
        optimizer.load_state_dict(self.optimizer)
        torch.set_rng_state(self.rng[0])
        if torch.cuda.is_available():
            for index, rng in enumerate(self.rng[1 : 1 + torch.cuda.device_count()]):
                torch.cuda.set_rng_state(rng, index)


def save_learner(folder: Path, policy: TrainedPolicy, state: LearnerState) -> None:
    """Write a checkpoint atomically; it replaces an older one of the same name."""
    with atomic_folder(folder) as fresh:
        try:
            policy.write(fresh)
        except SafetensorError as error:
            raise as_disk_error(error, fresh) from error
        content = {"format": FORMAT} | {part.name: getattr(state, part.name) for part in fields(state)}
        # With a path instead of a file, torch reports a full disk like a defect.
        with (fresh / STATE_FILE).open("wb") as file:
            torch.save(content, file)


def as_disk_error(error: SafetensorError, folder: Path) -> Exception:
    """Return the operating system's error behind a write error of safetensors."""
    code = re.search(r"os error (\d+)", str(error))
    return OSError(int(code[1]), os.strerror(int(code[1])), str(folder)) if code else error


def load_learner(folder: Path, policy: TrainedPolicy) -> LearnerState:
    """Load a checkpoint's weights into the policy, and return the rest.

    Raises:
        UserError: The folder is not a checkpoint, damaged, or of another model. The policy is unchanged.
    """
    weights, state = _read(folder, policy)
    try:
        policy.restore(weights | state.masters)
    except (ValueError, RuntimeError) as error:
        raise _other_model_error(folder) from error
    return state


def _other_model_error(folder: Path) -> UserError:
    return UserError(
        "the checkpoint was made for another model or other [trainer.model.lora] keys",
        where=str(folder),
        do="resume with the config it was started with",
    )


def _read(folder: Path, policy: TrainedPolicy) -> tuple[PolicyWeights, LearnerState]:
    try:
        content = torch.load(folder / STATE_FILE, map_location="cpu", weights_only=True)
        if not (folder / policy.marker_file).is_file():
            raise _other_model_error(folder)
        weights = policy.read(folder)
    except FileNotFoundError as error:
        raise UserError("not a checkpoint of the learner", where=str(folder), do="choose another folder") from error
    except DAMAGED as error:
        raise UserError(f"damaged checkpoint ({error})", where=str(folder), do="resume from an older one") from error
    if content.get("format") != FORMAT:
        what = f"checkpoint format {content.get('format')}"
        raise UserError(what, where=str(folder), do="use the version that wrote it")
    state = {part.name: content[part.name] for part in fields(LearnerState) if part.name in content}
    return weights, LearnerState(**state)
