"""`[[orchestrator.train.source]]` and `[[orchestrator.eval.source]]`: where tasks come from, and what plays them.

Names, defaults and meaning are Prime-RL's (`prime_rl/configs/orchestrator.py`). The `env` and `serve` tables belong to
verifiers and to the plugin; they are kept as they were written and checked by verifiers' own classes
(`harbortrainer.doctor.foreign_tables`).
"""

from typing import Self

from pydantic import Field, model_validator

from harbortrainer.config.algo_table import Algo
from harbortrainer.config.curriculum_table import CurriculumConfig
from harbortrainer.config.sampling_table import EvalSampling, TrainSampling
from harbortrainer.config.table import Table, TomlTable


class SourceConfig(Table):
    """What a training and an evaluation source share."""

    env: TomlTable
    """verifiers' own `env` table: taskset, agent (harness, runtime, max_turns), timeouts. As written."""

    serve: TomlTable = Field(default_factory=dict)
    """verifiers' own `serve` table: the pool of env server workers and the trials of each. As written."""

    name: str | None = Field(None, min_length=1)
    """Name in logs and metrics; the taskset's id when it is not given."""

    ratio: float = Field(1.0, gt=0)
    """Weight of this source among the sources."""

    @property
    def resolved_name(self) -> str:
        """The name in logs and metrics."""
        taskset, ident = self.env.get("taskset"), self.env.get("id")
        parts = [ident, taskset.get("id") if isinstance(taskset, dict) else None]
        return self.name or "+".join(str(part) for part in parts if part)

    @model_validator(mode="after")
    def _has_a_taskset(self) -> Self:
        taskset = self.env.get("taskset")
        if not self.env.get("id") and not (isinstance(taskset, dict) and taskset.get("id")):
            raise ValueError('no environment; set env.taskset.id = "harbor_env"')
        return self


class TrainSource(SourceConfig):
    """`[[orchestrator.train.source]]`."""

    sampling: TrainSampling = TrainSampling()
    """Sampling of this source; what is not set comes from `[orchestrator.train.sampling]`."""

    group_size: int = Field(1, ge=1)
    """Trials per task; comes from `orchestrator.group_size` when it is not set."""

    algo: Algo | None = None
    """The algorithm of this source; comes from `orchestrator.algo` when it is not set."""

    curriculum: CurriculumConfig | None = None
    """Which of its tasks are drawn, and which groups train; none draws each once an epoch and admits all."""


class EvalSource(SourceConfig):
    """`[[orchestrator.eval.source]]`; what is not set comes from `[orchestrator.eval]`."""

    sampling: EvalSampling = EvalSampling()
    """Sampling of this source."""

    num_examples: int = Field(-1, ge=-1)
    """Tasks that are evaluated; -1 means all."""

    group_size: int = Field(1, ge=1)
    """Trials per task."""

    interval: int = Field(100, ge=1)
    """Steps between two evaluations."""
