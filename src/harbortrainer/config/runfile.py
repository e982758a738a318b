"""The run file: Prime-RL's own TOML, read for the embedded engine.

Contract: `load` gives a `RunConfig` whose names, defaults and meaning are Prime-RL's at the pinned commit, so that
one file works on both engines; `seed` and `[warmup]` are ours alone.
Invariant: no key is dropped in silence. A key is honoured, or named in `RunConfig.notes` because only Prime-RL's own
processes use it, or refused in one line that says what to do.
"""

import uuid
from collections.abc import Sequence
from functools import reduce
from pathlib import Path
from typing import Self

import tomlkit
from pydantic import Field, PrivateAttr, model_validator

from harbortrainer.config.base import Table
from harbortrainer.config.orchestrator import OrchestratorConfig
from harbortrainer.config.reader import RawRun, read
from harbortrainer.config.trainer import TrainerConfig
from harbortrainer.engines.local.learner.settings import CosineScheduler, LinearScheduler, LoraSettings
from harbortrainer.warmup.config import WarmupConfig

NULLABLE = (("trainer.optim", "max_norm"), ("orchestrator.concurrency", "max_inflight"))
"""Keys for which none means something else than leaving them out."""


class ModelName(Table):
    """`[model]`."""

    name: str = "Qwen/Qwen3-0.6B"
    """The policy: a hub id, or a folder that transformers can load."""


class RunName(Table):
    """`[run]`."""

    name: str | None = None
    """Name of the run; made up when it is not given. A run that is to be resumed needs one."""

    dir: str | None = None
    """Name of the run's folder under `output_dir`; the run's name when it is not given."""


class CkptConfig(Table):
    """`[ckpt]`: when checkpoints are written; the last step always is."""

    interval: int | None = Field(None, ge=1)
    """Steps between two checkpoints; none means only at the end."""

    keep_last: int | None = Field(None, ge=1)
    """Most recent checkpoints that are kept; none means all."""

    keep_interval: int | None = Field(None, ge=1)
    """Checkpoints at multiples of this step are kept forever."""


class VllmConfig(Table):
    """`[inference.vllm]`: the one number of it that the embedded sampler shares."""

    max_model_len: int | None = Field(None, ge=1)
    """Most tokens of prompt and answer together; `seq_len` when it is not given."""


class InferenceConfig(Table):
    """`[inference]`."""

    vllm: VllmConfig = VllmConfig()
    """The sampler's limits."""


class RunConfig(Table):
    """A run, with every default filled in. `orchestrator.train.source` must have at least one entry."""

    model: ModelName = ModelName()
    """The policy."""

    max_steps: int | None = Field(None, ge=1)
    """Training steps; none means until it is stopped."""

    seq_len: int = Field(2048, ge=1)
    """Most tokens of one training sample; longer samples are cut."""

    seed: int = Field(0, ge=0)
    """Ours alone: seed of everything drawn by the embedded engine and the warm-up."""

    output_dir: Path = Path("outputs")
    """Folder of runs; each run writes to `output_dir / run.dir`."""

    clean: bool = False
    """Delete the run's folder before the start."""

    run: RunName = RunName()
    """The run's name and folder."""

    ckpt: CkptConfig | None = None
    """Checkpoints; none means only at the end."""

    inference: InferenceConfig = InferenceConfig()
    """The sampler's limits."""

    trainer: TrainerConfig = TrainerConfig()
    """How the weights change."""

    orchestrator: OrchestratorConfig
    """Which tasks are sampled, how, and what makes a batch."""

    warmup: WarmupConfig | None = None
    """Ours alone: make the policy first."""

    _notes: tuple[str, ...] = PrivateAttr(default=())

    @property
    def notes(self) -> tuple[str, ...]:
        """What the user should be told once: translated spellings, keys that only Prime-RL's processes use."""
        return self._notes

    @property
    def run_dir(self) -> Path:
        """The run's folder."""
        return self.output_dir / str(self.run.dir)

    @property
    def max_model_len(self) -> int:
        """Most tokens of prompt and answer together."""
        return self.inference.vllm.max_model_len or self.seq_len

    @property
    def lora(self) -> LoraSettings:
        """The adapter; the reader made sure that there is one."""
        assert self.trainer.model.lora is not None
        return self.trainer.model.lora

    def resolved(self) -> str:
        """The run as TOML with every default filled in; reading it again gives the same run.

        `clean` is left out, since it is about one start, and so is the sampler's address when it was not asked for.
        """
        data = self.model_dump(mode="json", exclude_none=True, exclude={"clean"})
        for table, key in NULLABLE:
            owner = reduce(getattr, table.split("."), self)
            if getattr(owner, key) is None:
                reduce(dict.__getitem__, table.split("."), data)[key] = "None"
        if "base_url" not in self.orchestrator.model.client.model_fields_set:
            del data["orchestrator"]["model"]
        return tomlkit.dumps(data)

    @model_validator(mode="after")
    def _name_the_run(self) -> Self:
        if self.run.name is None:
            envs = "+".join(dict.fromkeys(source.resolved_name for source in self.orchestrator.train.source))
            self.run.name = f"{envs}--{Path(self.model.name).name}--{uuid.uuid4().hex[:8]}".lower()
        self.run.dir = self.run.dir or self.run.name
        return self

    @model_validator(mode="after")
    def _needs_an_adapter(self) -> Self:
        if self.trainer.model.lora is None:
            raise ValueError("the embedded engine trains LoRA adapters only; add [trainer.model.lora]")
        return self

    @model_validator(mode="after")
    def _scheduler_fits(self) -> Self:
        plan, steps = self.trainer.scheduler, self.max_steps
        if isinstance(plan, LinearScheduler | CosineScheduler):
            if steps is None:
                raise ValueError(f"trainer.scheduler.type = {plan.type!r} needs max_steps")
            used = plan.warmup_steps + (plan.decay_steps if isinstance(plan, LinearScheduler) else 1)
            if used > steps:
                raise ValueError(f"trainer.scheduler needs {used} steps but max_steps is {steps}")
        return self


def load(path: Path | str, overrides: Sequence[str] = ()) -> RunConfig:
    """Read a run file for the embedded engine.

    Args:
        path: A TOML file in Prime-RL's schema, in today's spelling or the old one.
        overrides: As on Prime-RL's command line: `["--orchestrator.batch-size", "32", "--no-clean"]`.

    Returns:
        The run with every default filled in; what the user should be told is in `.notes`.

    Raises:
        UserError: With the file, the dotted key (or the line) and what to do.
    """
    return from_raw(read(path, overrides))


def from_raw(raw: RawRun) -> RunConfig:
    """The schema's reading of a file that was read already.

    Raises:
        UserError: As `load`.
    """
    config, notes = raw.validate(RunConfig)
    config._notes = notes
    return config
