"""Checks that a folder has a model's files, without importing or loading anything."""

import shlex
from pathlib import Path

from harbortrainer.errors import UserError
from harbortrainer.runs.provenance import find_engine

WEIGHTS = ("*.safetensors", "pytorch_model*.bin")


def missing_files(folder: Path) -> tuple[str, str] | None:
    """Return what is missing and the advice for the user; None if config and weights exist."""
    if not (folder / "config.json").is_file():
        do = "name the folder of a Hugging Face model"
        if (folder / "adapter_config.json").is_file():
            do = "this is a LoRA adapter; name its base model"
        elif find_engine(folder):
            export = f"`harbortrainer export {shlex.quote(str(folder))} --merged`"
            do = f"this is a run folder; export its model with {export} and name the export"
        return "no config.json", do
    if not any(next(folder.glob(pattern), None) for pattern in WEIGHTS):
        return "no weights", "add model.safetensors or its shards; the download may be incomplete"
    return None


def check_model_folder(model: str | Path) -> None:
    """Raise `UserError` if `model` is a folder without a config or weights; hub ids are not checked."""
    if Path(model).is_dir() and (missing := missing_files(Path(model))):
        raise UserError(f"{missing[0]} here", where=str(model), do=missing[1])
