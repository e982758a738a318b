"""The trained weights of a run of either engine, and their base model.

- Embedded engine: `checkpoints/step_N/` has a peft adapter or a whole model, with hashes of its files.
- Prime-RL: `broadcasts/step_N/` has a LoRA or a whole model, complete once `policy_files.py` says so.

Contract: `find` returns complete weights. The run's config is read as plain data, so that runs of other releases can be
exported.
"""

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Self, cast

from harbortrainer.config.table import TomlTable
from harbortrainer.errors import UserError, first_line
from harbortrainer.evaluation.policy_files import ADAPTER_CONFIG, no_weights_hint, weights_fault
from harbortrainer.export.hub_push import BaseModelOrigin
from harbortrainer.runs.checkpoints import newest_intact, passed_over_lines, steps_in
from harbortrainer.runs.provenance import FILE, Provenance, base_policy, engine_of, run_config


@dataclass(frozen=True)
class TrainedWeights:
    """The weights of one policy version of a run."""

    run: Path
    engine: str
    """`local` or `prime-rl`, as in a run's summary."""
    step: int
    """Number of updates; also the policy version."""
    folder: Path
    """Folder of the weights."""
    passed_over: tuple[str, ...] = ()
    """A line for each newer step with damaged or incomplete weights."""

    @classmethod
    def find(cls, run: Path, step: int | None = None) -> Self:
        """Find the weights after a step; without `step`, the newest complete ones.

        Raises:
            UserError: There is no run, it has no weights or not of that step, or they are damaged.
        """
        if not run.is_dir():
            what = "not a folder" if run.exists() else "no such folder"
            raise UserError(what, where=str(run), do="pass a run folder, e.g. outputs/NAME")
        engine = engine_of(run)
        return cls._of(run, engine, run / ("checkpoints" if engine == "local" else "broadcasts"), step)

    @classmethod
    def _of(cls, run: Path, engine: str, kept: Path, step: int | None) -> Self:
        steps = [number for number in steps_in(kept) if engine == "local" or number]  # Prime-RL's 0 is the base
        if not steps:
            raise UserError("no trained weights in this run", where=str(kept), do=no_weights_hint(run, engine))
        if step is not None and step not in steps:
            kept_steps = ", ".join(map(str, steps))
            raise UserError(f"step {step} is not kept here", where=str(kept), do=f"choose --step among {kept_steps}")
        found, faults = newest_intact(
            kept, [step] if step is not None else steps, lambda folder: weights_fault(folder, engine)
        )
        if found is not None:
            return cls(run, engine, int(found.name.removeprefix("step_")), found, passed_over_lines(kept, faults))
        number, fault = next(iter(faults.items()))
        what = f"no complete weights (step_{number}: {fault})"
        raise UserError(what, where=str(kept), do="choose another --step, or export later")

    @property
    def is_adapter(self) -> bool:
        """Whether the weights are a LoRA adapter; else they are a whole model."""
        return (self.folder / ADAPTER_CONFIG).is_file()

    @property
    def name(self) -> str:
        """Name of an export of these weights."""
        return f"{self.run.absolute().name}-step_{self.step}"

    @cached_property
    def config(self) -> TomlTable:
        """The resolved config of the run. Raises `UserError` if it cannot be read."""
        return run_config(self.run)

    @cached_property
    def provenance(self) -> Provenance:
        """Provenance of the run; empty for a run of a release that did not record it."""
        file = self.run / (FILE if self.engine == "local" else f"configs/{FILE}")
        try:
            return Provenance.model_validate_json(file.read_bytes())
        except FileNotFoundError:
            return Provenance()
        except (OSError, ValueError) as error:
            what = f"cannot be read ({first_line(error)})"
            raise UserError(what, where=str(file), do="restore the file, or remove it to continue without it") from None

    @property
    def adapter_config(self) -> TomlTable:
        """peft's config of the adapter. Raises `UserError` if it cannot be read."""
        file = self.folder / ADAPTER_CONFIG
        try:
            config: object = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise UserError(f"cannot be read ({error})", where=str(file), do="choose another --step") from None
        if not isinstance(config, dict) or config.get("peft_type") != "LORA" or not isinstance(config.get("r"), int):
            raise UserError("is not a LoRA config", where=str(file), do="use the release that wrote this run")
        return cast(TomlTable, config)

    @cached_property
    def base(self) -> BaseModelOrigin:
        """The base model. Raises `UserError` if it is unknown."""
        named = None
        if self.is_adapter and not self.config.get("warmup"):
            named = self.adapter_config.get("base_model_name_or_path")
        return BaseModelOrigin.of(str(named or base_policy(self.run)), self.provenance.weights)
