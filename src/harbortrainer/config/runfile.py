"""The run file's schema, as far as the embedded engine honours it.

Contract: names, defaults and meaning are Prime-RL's at the pinned commit, so that one file works on both engines;
`seed`, `tensorboard`, `transcripts_mb`, `inference.engine`, `model.quantization`, `[prices]` and `[warmup]` are ours
alone.
"""

import re
import uuid
from collections.abc import Sequence
from functools import reduce
from pathlib import Path
from typing import Literal, Self

import tomlkit
from pydantic import Field, PrivateAttr, field_validator, model_validator

from harbortrainer.config.monitors_table import MonitorsConfig, Prices
from harbortrainer.config.orchestrator_table import OrchestratorConfig
from harbortrainer.config.source_table import SourceConfig
from harbortrainer.config.table import Table, changed, spelled_out
from harbortrainer.config.trainer_table import LoraSettings, TrainerConfig, require_fit
from harbortrainer.config.warmup_table import WarmupConfig

FOLDER_NAME = re.compile(r"[\w+@=,-][\w+@=, .-]{0,199}")
"""What a run's folder may be called: no slash, no dot at the start."""

Quantization = Literal["int8", "nf4"]
"""In how few bits a base may lie in memory: 8 or 4."""

VLLM_SHARE = 0.5
"""Of the card's memory, for vLLM beside a learner."""

NULLABLE = ("trainer.optim.max_norm", "orchestrator.concurrency.max_inflight")
"""Keys for which none means something else than leaving them out."""


class ModelName(Table):
    """`[model]`."""

    name: str = Field("Qwen/Qwen3-0.6B", min_length=1)
    """The policy: a hub id, or a folder that transformers can load."""

    quantization: Quantization | None = None
    """Ours alone: the embedded engine keeps the base's linear layers in 8 bits (int8) or 4 (nf4), for sampling and
    learning alike; needs bitsandbytes (the extra `quantized`). None keeps them as they are."""


class RunName(Table):
    """`[run]`."""

    name: str | None = None
    """Name of the run; made up when it is not given. A run that is to be resumed needs one."""

    dir: str | None = None
    """Name of the run's folder under `output_dir`; the run's name when it is not given."""

    @field_validator("name", "dir")
    @classmethod
    def _stays_in_output_dir(cls, name: str | None) -> str | None:
        """The folder of that name is written to, and with `clean` removed: it must lie in `output_dir`."""
        if name is not None and not FOLDER_NAME.fullmatch(name):
            raise ValueError(f"{name!r} is no name of a folder; use letters, digits, '-', '_', '.' and '+'")
        return name


class CkptConfig(Table):
    """`[ckpt]`: when checkpoints are written; the last step always is."""

    interval: int | None = Field(None, ge=1)
    """Steps between two checkpoints; none means only at the end."""

    keep_last: int | None = Field(None, ge=1)
    """Most recent checkpoints that are kept; none means all."""

    keep_interval: int | None = Field(None, ge=1)
    """Checkpoints at multiples of this step are kept forever."""


class VllmConfig(Table):
    """`[inference.vllm]`: the numbers of it that mean something on the embedded engine."""

    max_model_len: int | None = Field(None, ge=1)
    """Most tokens of prompt and answer together; `seq_len` when it is not given."""

    gpu_memory_utilization: float | None = Field(None, gt=0, le=1)
    """vLLM's share of the card's memory where vLLM samples, half of it when it is not given; the learner has the
    rest."""


class InferenceConfig(Table):
    """`[inference]`."""

    engine: Literal["embedded", "vllm"] = "embedded"
    """Ours alone: who samples on the embedded engine, it itself or a `vllm serve` that it starts beside the learner."""

    vllm: VllmConfig = VllmConfig()
    """The sampler's limits."""

    @property
    def vllm_share(self) -> float:
        """vLLM's share of the card's memory."""
        return self.vllm.gpu_memory_utilization or VLLM_SHARE


class RunBasics(Table):
    """What a run is on either engine: which policy, on how long samples, in which folder."""

    model: ModelName = ModelName()
    """The policy."""

    seq_len: int = Field(2048, ge=1)
    """Most tokens of one training sample; longer samples are cut."""

    output_dir: Path = Path("outputs")
    """Folder of runs; each run writes to `output_dir / run.dir`."""

    clean: bool = False
    """Delete the run's folder before the start."""

    run: RunName = RunName()
    """The run's name and folder."""

    @property
    def run_dir(self) -> Path:
        """The run's folder."""
        return self.output_dir / str(self.run.dir)

    def name_after(self, sources: Sequence[SourceConfig]) -> None:
        """Make up a name as Prime-RL does when the file gives none; the folder is named after the run."""
        if self.run.name is None:
            envs = "+".join(dict.fromkeys(source.resolved_name for source in sources))
            name = f"{envs or 'no-env'}--{Path(self.model.name).name}--{uuid.uuid4().hex[:8]}".lower()
            self.run.name = re.sub(r"[^\w+.-]", "-", name).lstrip(".-")
        self.run.dir = self.run.dir or self.run.name


class RunConfig(RunBasics):
    """A run, with every default filled in. `orchestrator.train.source` must have at least one entry."""

    max_steps: int | None = Field(None, ge=1)
    """Training steps; none means until it is stopped."""

    seed: int = Field(0, ge=0)
    """Ours alone: seed of everything drawn by the embedded engine and the warm-up."""

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

    transcripts_mb: int = Field(4000, ge=0)
    """Ours alone: most megabytes of transcripts in the run's folder; the oldest steps' go first, 0 keeps none."""

    monitors: MonitorsConfig = MonitorsConfig()
    """Who is shown the figures beside the run's folder."""

    tensorboard: bool = False
    """Ours alone: event files for TensorBoard too, in `tensorboard/` of the run's folder (the extra `monitors`)."""

    prices: Prices | None = None
    """Ours alone: what tokens and hours cost, for the figures `cost/...`."""

    _notes: tuple[str, ...] = PrivateAttr(default=())

    @property
    def notes(self) -> tuple[str, ...]:
        """What the user should be told once: translated spellings, keys that only Prime-RL's processes use."""
        return self._notes

    def with_notes(self, *notes: str) -> Self:
        """The run with what the user should be told about its reading."""
        self._notes = notes
        return self

    @property
    def max_model_len(self) -> int:
        """Most tokens of prompt and answer together."""
        return self.inference.vllm.max_model_len or self.seq_len

    @property
    def lora(self) -> LoraSettings | None:
        """The adapter; none where every weight is trained."""
        return self.trainer.model.lora

    def resolved(self) -> str:
        """The run as TOML with every default filled in; reading it again gives the same run.

        `clean` is left out, since it is about one start, and so is the sampler's address when it was not asked for.
        """
        data = self.model_dump(mode="json", exclude_none=True, exclude={"clean"})
        for key in NULLABLE:
            data = data if reduce(getattr, key.split("."), self) is not None else changed(data, key, "None")
        if "base_url" not in self.orchestrator.model.client.model_fields_set:
            del data["orchestrator"]["model"]
        return tomlkit.dumps(spelled_out(data))

    @model_validator(mode="after")
    def _name_the_run(self) -> Self:
        self.name_after(self.orchestrator.train.source)
        return self

    @model_validator(mode="after")
    def _every_weight_is_trained_where_that_can_be(self) -> Self:
        if self.lora is None and self.model.quantization is not None:
            raise ValueError("a quantized base is not trained itself; add [trainer.model.lora]")
        if self.lora is None and self.inference.engine == "vllm":
            raise ValueError("vLLM is handed adapters only; add [trainer.model.lora], or leave out inference.engine")
        return self

    @model_validator(mode="after")
    def _vllm_has_a_base_of_its_own(self) -> Self:
        if self.model.quantization is not None and self.inference.engine == "vllm":
            raise ValueError("model.quantization is for the embedded sampler: vLLM would sample from another base")
        return self

    @model_validator(mode="after")
    def _scheduler_fits(self) -> Self:
        require_fit(self.trainer.scheduler, self.max_steps)
        return self
