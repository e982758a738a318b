"""What a model folder must hold, said before torch is imported: a mistake is told at once, not after seconds."""

from pathlib import Path

from harbortrainer.errors import UserError

_WEIGHTS = ("*.safetensors", "pytorch_model*.bin")


def check_folder(model: str | Path) -> None:
    """Raises `UserError` when `model` is a folder that lacks a config or weights; says nothing about hub ids."""
    folder = Path(model)
    if not folder.is_dir():
        return
    if not (folder / "config.json").is_file():
        hint = "this is a LoRA adapter; name its base model" if (folder / "adapter_config.json").is_file() else ""
        raise UserError("no config.json here", where=str(folder), do=hint or "name a folder of a transformers model")
    if not any(next(folder.glob(pattern), None) for pattern in _WEIGHTS):
        raise UserError(
            "no weights here (model.safetensors or its shards)", where=str(folder), do="name a folder with weights"
        )
