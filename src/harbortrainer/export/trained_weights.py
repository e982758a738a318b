"""Which of a run's weights are exported, and what they stand on: read from the run folder of either engine.

    embedded    checkpoints/step_N/    a peft adapter or a whole model, with hashes that say whether it is whole
    Prime-RL    broadcasts/step_N/     a LoRA or a whole model, whole once STABLE lies in it
                (src/prime_rl/transports/weights/filesystem.py, 559b44772)

Contract: what `find` returns is whole. The run's config is read as plain data, so that a run of another release can
be exported as long as its weights can be read.
"""

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Self, cast

from harbortrainer.config.table import TomlTable
from harbortrainer.errors import UserError
from harbortrainer.evaluation.policy_files import ADAPTER_CONFIG, ADAPTER_FILE
from harbortrainer.export.base_model import BaseModelOrigin
from harbortrainer.runs.ingredients import FILE, Ingredients
from harbortrainer.runs.progress import NAME, steps_in, wrong_with
from harbortrainer.runs.starting_model import LOCAL_CONFIG, PRIME_CONFIG, run_config, starting_model

STABLE = "STABLE"


@dataclass(frozen=True)
class TrainedWeights:
    """The weights of one policy version of a run."""

    run: Path
    engine: str
    """`local` or `prime-rl`, as summaries name them."""
    step: int
    """Updates made: the policy version."""
    folder: Path
    """Where they lie."""

    @classmethod
    def find(cls, run: Path, step: int | None = None) -> Self:
        """The weights after a step; without one, the newest that are whole.

        Raises:
            UserError: No run, no weights in it, not that step, or damaged ones.
        """
        if not run.is_dir():
            raise UserError("no such folder", where=str(run), do="name a run's folder, as outputs/RUN")
        if (run / LOCAL_CONFIG).is_file():
            return cls._of(run, "local", run / "checkpoints", step)
        if (run / PRIME_CONFIG).is_file():
            return cls._of(run, "prime-rl", run / "broadcasts", step)
        what = f"no run here: neither {LOCAL_CONFIG} nor {PRIME_CONFIG}"
        raise UserError(what, where=str(run), do="name a run's folder, as outputs/RUN")

    @classmethod
    def _of(cls, run: Path, engine: str, kept: Path, step: int | None) -> Self:
        steps = steps_in(kept) if engine == "local" else _broadcast(kept)
        if not steps:
            raise UserError("no trained weights in this run", where=str(kept), do=_nothing_yet(run, engine))
        if step is not None and step not in steps:
            kept_steps = ", ".join(map(str, steps))
            raise UserError(f"step {step} is not kept here", where=str(kept), do=f"choose --step among {kept_steps}")
        faults: list[str] = []
        for number in [step] if step is not None else reversed(steps):
            found = cls(run, engine, number, kept / f"step_{number}")
            if (fault := found._fault()) is None:
                return found
            faults.append(f"step_{number}: {fault}")
        raise UserError(f"no whole weights ({faults[0]})", where=str(kept), do="choose another --step, or export later")

    def _fault(self) -> str | None:
        if self.engine == "local" and (wrong := wrong_with(self.folder)):
            return wrong
        if self.engine == "prime-rl" and not (self.folder / STABLE).exists():
            return f"{STABLE} is missing: it was not written to its end"
        if (self.folder / ADAPTER_CONFIG).is_file():
            return None if (self.folder / ADAPTER_FILE).is_file() else f"{ADAPTER_FILE} is missing"
        if next(self.folder.glob("*.safetensors"), None) is None:
            return "there are no *.safetensors"
        whole = self.engine == "prime-rl" or (self.folder / "config.json").is_file()
        return None if whole else f"{ADAPTER_CONFIG} is missing"

    @property
    def is_adapter(self) -> bool:
        """Whether they are a LoRA's; else they are a whole model's."""
        return (self.folder / ADAPTER_CONFIG).is_file()

    @property
    def name(self) -> str:
        """What an export of them is called."""
        return f"{self.run.absolute().name}-step_{self.step}"

    @cached_property
    def config(self) -> TomlTable:
        """The run's config as it was resolved. Raises `UserError` when it cannot be read."""
        return run_config(self.run)

    @cached_property
    def ingredients(self) -> Ingredients:
        """What the run was made of; empty for a run of a release that did not write it down."""
        file = self.run / (FILE if self.engine == "local" else f"configs/{FILE}")
        try:
            return Ingredients.model_validate_json(file.read_bytes())
        except FileNotFoundError:
            return Ingredients()
        except (OSError, ValueError) as error:
            what = f"cannot be read ({str(error).splitlines()[0]})"
            raise UserError(what, where=str(file), do="put it back, or remove it to go on without") from None

    @property
    def adapter_config(self) -> TomlTable:
        """What peft's config of the adapter says. Raises `UserError` when it cannot be read."""
        file = self.folder / ADAPTER_CONFIG
        try:
            told: object = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise UserError(f"cannot be read ({error})", where=str(file), do="choose another --step") from None
        if not isinstance(told, dict) or told.get("peft_type") != "LORA" or not isinstance(told.get("r"), int):
            raise UserError("is no LoRA's", where=str(file), do="use the release that wrote this run")
        return cast(TomlTable, told)

    @cached_property
    def base(self) -> BaseModelOrigin:
        """The model that they were trained on. Raises `UserError` when nobody says which."""
        named = None
        if self.is_adapter and not self.config.get("warmup"):
            named = self.adapter_config.get("base_model_name_or_path")
        return BaseModelOrigin.of(str(named or starting_model(self.run)), self.ingredients.weights)


def _broadcast(folder: Path) -> list[int]:
    matches = [NAME.fullmatch(path.name) for path in folder.glob("step_*") if path.is_dir()]
    return sorted(int(match[1]) for match in matches if match and match[1] != "0")


def _nothing_yet(run: Path, engine: str) -> str:
    if engine == "local":
        return "let it finish a step first"
    if next((run / "checkpoints").glob("step_*"), None):
        return 'its checkpoints are sharded and are not read: set weight_broadcast.type = "filesystem" and --resume'
    return 'let it finish a step first; only what `weight_broadcast.type = "filesystem"` leaves can be exported'
