"""A policy on disk: a model, an adapter on a model, a checkpoint of a run, or a run (its last good checkpoint).

Contract: `find` checks that the files exist. The adapter is loaded as in the run's own sampler.
"""

import json
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Self

from harbortrainer.config.runfile import ModelName, Quantization
from harbortrainer.engines.model_folder import check_model_folder
from harbortrainer.errors import UserError
from harbortrainer.runs.checkpoints import checkpoint_damage, newest_intact, passed_over_lines, steps_in

if TYPE_CHECKING:
    from harbortrainer.engines.local.sampler import Sampler

ADAPTER_CONFIG, ADAPTER_FILE = "adapter_config.json", "adapter_model.safetensors"


@dataclass(frozen=True)
class PolicyFiles:
    """The files of one policy."""

    base: str
    """Folder or hub id of the base model."""
    adapter: Path | None = None
    """Folder of a peft adapter for the base."""
    quantization: Quantization | None = None
    """Quantization of the base in the adapter's run; None for an adapter outside a run."""
    passed_over: tuple[str, ...] = field(default=(), compare=False)
    """A line for each newer damaged checkpoint of the run."""

    @classmethod
    def find(cls, named: str) -> Self:
        """Find the policy of a folder or hub id.

        Raises:
            UserError: The folder does not exist or has no policy.
        """
        folder, passed_over = Path(named), ()
        if not folder.is_dir():
            if folder.exists() or named.startswith((".", "/", "~")) or (folder.parent.name and folder.parent.is_dir()):
                raise UserError("no such folder", where=named, do="pass a model folder or a hub id")
            return cls(named)
        if (folder / "checkpoints").is_dir():
            folder, passed_over = _last_checkpoint(folder)
        if not (folder / ADAPTER_CONFIG).is_file():
            check_model_folder(folder)
            return cls(named if folder == Path(named) else str(folder), passed_over=passed_over)
        if not (folder / ADAPTER_FILE).is_file():
            raise UserError(
                f"no {ADAPTER_FILE} beside {ADAPTER_CONFIG}",
                where=str(folder),
                do="pass the folder of a complete adapter",
            )
        return cls(_base_of(folder), folder, _quantization_of(folder), passed_over)

    def __str__(self) -> str:
        base = f"{self.base} in {self.quantization}" if self.quantization else self.base
        return f"{self.adapter} on {base}" if self.adapter else base

    def context_limit(self, wanted: int) -> int | None:
        """Return `wanted`, limited to the model's context length; None if that is unknown."""
        try:
            config = json.loads((Path(self.base) / "config.json").read_text(encoding="utf-8"))
            own = config.get("max_position_embeddings")
        except (OSError, ValueError, AttributeError):
            return None
        return min(wanted, own) if isinstance(own, int) else wanted

    def load_adapter(self, sampler: "Sampler") -> None:
        """Load the adapter into a sampler of the base. Raises `UserError` if it does not fit."""
        if self.adapter is None:
            return
        from peft import LoraConfig
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        from harbortrainer.engines.local.sampler.sampled_model import AdapterError

        try:
            config = LoraConfig.from_pretrained(str(self.adapter))
            sampler.load_adapter(load_file(self.adapter / ADAPTER_FILE), 1, config=config)
        except (AdapterError, SafetensorError, TypeError, ValueError) as error:
            do = "use a plain LoRA adapter with its own base model"
            raise UserError(f"does not fit {self.base}: {error}", where=str(self.adapter), do=do) from error


def _quantization_of(checkpoint: Path) -> Quantization | None:
    """Return the quantization in the config of a checkpoint's run."""
    try:
        run = tomllib.loads((checkpoint.resolve().parents[1] / "config.toml").read_text(encoding="utf-8"))
    except (OSError, ValueError, IndexError):
        return None
    return ModelName.model_validate(run.get("model", {}), extra="ignore").quantization


def _last_checkpoint(run: Path) -> tuple[Path, tuple[str, ...]]:
    folder = run / "checkpoints"
    found, damaged = newest_intact(folder, steps_in(folder), checkpoint_damage)
    if found is None:
        what = "".join(f" (step_{step}: {what})" for step, what in list(damaged.items())[:1])
        raise UserError(f"no intact checkpoint in this run{what}", where=str(folder), do="pass a model or an adapter")
    return found, passed_over_lines(folder, damaged)


def _base_of(adapter: Path) -> str:
    file = adapter / ADAPTER_CONFIG
    try:
        base = json.loads(file.read_text(encoding="utf-8"))["base_model_name_or_path"]
    except (OSError, ValueError, KeyError, TypeError):
        base = None
    if not isinstance(base, str) or not base:
        raise UserError("no base_model_name_or_path", where=str(file), do="add the model that it was trained on")
    if base.startswith(("/", ".")) and not Path(base).is_dir():
        raise UserError(f"its base model {base} does not exist", where=str(file), do="restore it, or correct the name")
    return base
