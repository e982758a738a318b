"""`[[orchestrator.train.source]]` and `[[orchestrator.eval.source]]`: where tasks come from, and what plays them.

Names, defaults and meaning are Prime-RL's (`prime_rl/configs/orchestrator.py`). The `env` and `serve` tables belong to
verifiers and to the plugin; they are kept as they were written and checked by verifiers' own classes
(`harbortrainer.config.sources`).
"""

from typing import Any, Literal, Self

from pydantic import Field, model_validator

from harbortrainer.config.base import Table
from harbortrainer.config.sampling import EvalSampling, TrainSampling
from harbortrainer.engines.local.learner.settings import LengthPenalty


class Algo(Table):
    """`[orchestrator.algo]`: the group-relative algorithm."""

    type: Literal["grpo"] = "grpo"
    """Advantage = reward minus the mean of the group; the embedded engine has this one."""

    length_penalty: LengthPenalty | None = None
    """What a trial's reward loses for length before the mean is taken; none by default."""


class Source(Table):
    """What a training and an evaluation source share."""

    env: dict[str, Any]
    """verifiers' own `env` table: taskset, agent (harness, runtime, max_turns), timeouts. As written."""

    serve: dict[str, Any] = Field(default_factory=dict)
    """verifiers' own `serve` table: the pool of env server workers and the trials of each. As written."""

    name: str | None = None
    """Name in logs and metrics; the taskset's id when it is not given."""

    ratio: float = Field(1.0, gt=0)
    """Weight of this source among the sources."""

    @property
    def resolved_name(self) -> str:
        """The name in logs and metrics."""
        taskset, ident = self.env.get("taskset") or {}, self.env.get("id")
        parts = [part for part in (ident, taskset.get("id")) if part]
        return self.name or "+".join(parts)

    @model_validator(mode="after")
    def _has_a_taskset(self) -> Self:
        if not self.resolved_name:
            raise ValueError('no environment; set env.taskset.id = "harbor_env"')
        return self


class TrainSource(Source):
    """`[[orchestrator.train.source]]`."""

    sampling: TrainSampling = TrainSampling()
    """Sampling of this source; what is not set comes from `[orchestrator.train.sampling]`."""

    group_size: int = Field(1, ge=1)
    """Trials per task; comes from `orchestrator.group_size` when it is not set."""

    algo: Algo | None = None
    """The algorithm of this source; comes from `orchestrator.algo` when it is not set."""


class EvalSource(Source):
    """`[[orchestrator.eval.source]]`; what is not set comes from `[orchestrator.eval]`."""

    sampling: EvalSampling = EvalSampling()
    """Sampling of this source."""

    num_examples: int = Field(-1, ge=-1)
    """Tasks that are evaluated; -1 means all."""

    group_size: int = Field(1, ge=1)
    """Trials per task."""

    interval: int = Field(100, ge=1)
    """Steps between two evaluations."""
