"""A policy on disk: a model, an adapter on a model, a checkpoint of a run, or a run (its newest complete weights).

Prime-RL's weights are those of `broadcasts/step_N/`, complete once the folder contains `STABLE`
(src/prime_rl/transports/weights/filesystem.py, 559b44772) or `.finished` (newer releases).

Contract: `find` checks that the files exist. The adapter is loaded as in the run's own sampler.
"""

import json
import shlex
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Self

from harbortrainer.config.runfile import ModelName, Quantization
from harbortrainer.engines.model_folder import check_model_folder
from harbortrainer.errors import UserError
from harbortrainer.runs.checkpoints import checkpoint_damage, newest_intact, passed_over_lines, steps_in
from harbortrainer.runs.prime_rl_files import WEIGHTS_COMPLETE
from harbortrainer.runs.provenance import (
    base_policy,
    base_policy_files,
    find_engine,
    first_change,
    model_fingerprints,
    run_config,
)

if TYPE_CHECKING:
    from harbortrainer.engines.local.sampler import Sampler

ADAPTER_CONFIG, ADAPTER_FILE = "adapter_config.json", "adapter_model.safetensors"
BROADCASTS = "broadcasts"


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
            UserError: The folder does not exist or has no policy, or the base model of its run has changed.
        """
        folder, passed_over = Path(named), ()
        if not folder.is_dir():
            if folder.exists() or named.startswith((".", "/", "~")) or (folder.parent.name and folder.parent.is_dir()):
                raise UserError("no such folder", where=named, do="pass a model folder or a hub id")
            return cls(named)
        run = prime_rl_run(folder)
        if run is not None:
            folder, passed_over = _last_broadcast(folder, run)
        elif (folder / "checkpoints").is_dir() or (find_engine(folder) and not (folder / "config.json").is_file()):
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
        return cls(_base_of(folder, run), folder, _quantization_of(folder), passed_over)

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


def prime_rl_run(folder: Path) -> Path | None:
    """Return the run of Prime-RL that `folder` is, or whose broadcast it is; None if there is none."""
    run = folder.absolute().parents[1] if folder.absolute().parent.name == BROADCASTS else folder
    return run if find_engine(run) == "prime-rl" else None


def _last_broadcast(folder: Path, run: Path) -> tuple[Path, tuple[str, ...]]:
    """Return the newest complete adapter of a run of Prime-RL, or the named one."""
    kept = run / BROADCASTS
    own = [step for step in steps_in(kept) if step and folder in (run, folder.parent / f"step_{step}")]  # 0 is the base
    found, faults = newest_intact(kept, own, lambda one: weights_fault(one, "prime-rl"))
    if found is None:
        what = "".join(f" (step_{step}: {fault})" for step, fault in list(faults.items())[:1])
        raise UserError(f"no complete weights{what}", where=str(folder), do=no_weights_hint(run, "prime-rl"))
    if not (found / ADAPTER_CONFIG).is_file():
        do = f"run `harbortrainer export {shlex.quote(str(run))}`, and evaluate the export"
        raise UserError("Prime-RL keeps a whole model without its config", where=str(found), do=do)
    return found, passed_over_lines(kept, faults)


def _base_of(adapter: Path, run: Path | None) -> str:
    file = adapter / ADAPTER_CONFIG
    try:
        base = json.loads(file.read_text(encoding="utf-8"))["base_model_name_or_path"]
    except (OSError, ValueError, KeyError, TypeError):
        base = None
    if run is not None:
        base = base or base_policy(run)
    own_run = _run_of_checkpoint(adapter)
    if own_run is not None and run_config(own_run).get("warmup"):
        base = base_policy(own_run)  # the adapter names it by its place, and the run may have been moved
    if not isinstance(base, str) or not base:
        raise UserError("no base_model_name_or_path", where=str(file), do="add the model that it was trained on")
    if base.startswith(("/", ".")) and not Path(base).is_dir():
        raise UserError(f"its base model {base} does not exist", where=str(file), do="restore it, or correct the name")
    recorded = base_policy_files(own_run) if own_run is not None and Path(base).is_dir() else {}
    if recorded and (change := first_change(recorded, model_fingerprints(base))):
        what = f"its base model {base} differs from the one that the run started from: {change}"
        raise UserError(what, where=str(file), do="restore it")
    return base


def _run_of_checkpoint(checkpoint: Path) -> Path | None:
    """Return the run of the embedded engine that a checkpoint is in; None if there is none."""
    folder = checkpoint.absolute()
    run = folder.parents[1] if folder.parent.name == "checkpoints" else None
    engine = find_engine(run) if run is not None else None
    return run if engine == "local" else None


def weights_fault(folder: Path, engine: str) -> str | None:
    """Describe the damage of a step's weights; None if they are complete."""
    if engine == "local" and (wrong := checkpoint_damage(folder)):
        return wrong
    if engine == "prime-rl" and not any((folder / mark).exists() for mark in WEIGHTS_COMPLETE):
        return f"{' or '.join(WEIGHTS_COMPLETE)} is missing, so it is incomplete"
    if (folder / ADAPTER_CONFIG).is_file():
        return None if (folder / ADAPTER_FILE).is_file() else f"{ADAPTER_FILE} is missing"
    if next(folder.glob("*.safetensors"), None) is None:
        return "there are no *.safetensors"
    whole = engine == "prime-rl" or (folder / "config.json").is_file()
    return None if whole else f"{ADAPTER_CONFIG} is missing"


def no_weights_hint(run: Path, engine: str) -> str:
    """Return the advice for a run without trained weights."""
    if engine == "local":
        return "wait until the run has finished a step"
    if next((run / "checkpoints").glob("step_*"), None):
        return (
            'its checkpoints are sharded, which is not supported; set weight_broadcast.type = "filesystem" and --resume'
        )
    return 'wait until the run has finished a step; only runs with weight_broadcast.type = "filesystem" can be exported'
