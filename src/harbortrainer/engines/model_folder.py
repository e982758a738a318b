"""What a folder lacks that is to be a model; nothing is imported and nothing loaded to find out."""

from pathlib import Path

from harbortrainer.errors import UserError

WEIGHTS = ("*.safetensors", "pytorch_model*.bin")


def lack(folder: Path) -> tuple[str, str] | None:
    """What is missing and what the user should do; None when config and weights are there."""
    if not (folder / "config.json").is_file():
        is_adapter = (folder / "adapter_config.json").is_file()
        do = "this is a LoRA adapter; name its base model" if is_adapter else "name the folder of a Hugging Face model"
        return "no config.json", do
    if not any(next(folder.glob(pattern), None) for pattern in WEIGHTS):
        return "no weights", "it needs model.safetensors or its shards; was the download cut?"
    return None


def check_folder(model: str | Path) -> None:
    """Raises `UserError` when `model` is a folder that lacks a config or weights; says nothing about hub ids."""
    if Path(model).is_dir() and (missing := lack(Path(model))):
        raise UserError(f"{missing[0]} here", where=str(model), do=missing[1])
