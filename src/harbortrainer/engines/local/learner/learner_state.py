"""The learner on disk: its policy as others load it, and beside it what is needed to go on exactly.

    adapter_config.json, adapter_model.safetensors    `peft.PeftModel.from_pretrained(base, folder)` loads them
    or config.json, model*.safetensors, tokenizer     `AutoModelForCausalLM.from_pretrained(folder)` loads them
    learner.pt                                        format, version, optimizer, random state, float32 weights

A folder is written under another name and renamed, so it is complete or not there (`runs/durable.py`).
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
"""What torch and safetensors raise on a file that is cut or overwritten."""


@dataclass(frozen=True, slots=True)
class LearnerState:
    """What a checkpoint holds beside the policy."""

    version: int
    optimizer: dict[str, object]
    rng: list[torch.Tensor]
    """torch's random state: the CPU's, then each GPU's."""
    masters: PolicyWeights = field(default_factory=dict)
    """What the optimizer steps on from, where that is not what the policy computes with."""

    @classmethod
    def now(cls, version: int, optimizer: torch.optim.Optimizer, policy: TrainedPolicy) -> Self:
        """The state of this moment."""
        gpus = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
        return cls(version, optimizer.state_dict(), [torch.get_rng_state(), *gpus], policy.masters())

    def restore(self, optimizer: torch.optim.Optimizer) -> None:
        """Put all but the policy's weights back; GPUs that are not there any more are left out."""
        optimizer.load_state_dict(self.optimizer)
        torch.set_rng_state(self.rng[0])
        if torch.cuda.is_available():
            for index, rng in enumerate(self.rng[1 : 1 + torch.cuda.device_count()]):
                torch.cuda.set_rng_state(rng, index)


def save_learner(folder: Path, policy: TrainedPolicy, state: LearnerState) -> None:
    """Write a checkpoint; an older one of that name is replaced, at no moment is there half of one."""
    with atomic_folder(folder) as fresh:
        try:
            policy.write(fresh)
        except SafetensorError as error:
            raise as_disk_error(error, fresh) from error
        content = {"format": FORMAT} | {part.name: getattr(state, part.name) for part in fields(state)}
        # Python's own file: given a path torch tells of a full disk as it does of a defect.
        with (fresh / STATE_FILE).open("wb") as file:
            torch.save(content, file)


def as_disk_error(error: SafetensorError, folder: Path) -> Exception:
    """What safetensors raises when it cannot write, as the error of the operating system that it was."""
    code = re.search(r"os error (\d+)", str(error))
    return OSError(int(code[1]), os.strerror(int(code[1])), str(folder)) if code else error


def load_learner(folder: Path, policy: TrainedPolicy) -> LearnerState:
    """Put a checkpoint's weights into the policy and read the rest.

    Raises:
        UserError: The folder is no checkpoint of this program, damaged, or of another model. Nothing has changed then.
    """
    weights, state = _read(folder, policy)
    try:
        policy.restore(weights | state.masters)
    except (ValueError, RuntimeError) as error:
        raise _of_another(folder) from error
    return state


def _of_another(folder: Path) -> UserError:
    return UserError(
        "the checkpoint was made for another model or other [trainer.model.lora] keys",
        where=str(folder),
        do="resume with the config it was started with",
    )


def _read(folder: Path, policy: TrainedPolicy) -> tuple[PolicyWeights, LearnerState]:
    try:
        content = torch.load(folder / STATE_FILE, map_location="cpu", weights_only=True)
        if not (folder / policy.mark).is_file():
            raise _of_another(folder)
        weights = policy.read(folder)
    except FileNotFoundError as error:
        raise UserError("not a checkpoint of the learner", where=str(folder), do="name another folder") from error
    except DAMAGED as error:
        raise UserError(f"damaged checkpoint ({error})", where=str(folder), do="resume from an older one") from error
    if content.get("format") != FORMAT:
        what = f"checkpoint format {content.get('format')}"
        raise UserError(what, where=str(folder), do="use the version that wrote it")
    state = {part.name: content[part.name] for part in fields(LearnerState) if part.name in content}
    return weights, LearnerState(**state)
