"""`[orchestrator]`: which tasks are sampled, how, and what makes a batch.

Names, defaults and meaning are Prime-RL's (`prime_rl/configs/orchestrator.py`).
"""

from collections import Counter
from collections.abc import Iterable
from typing import Literal, Self
from urllib.parse import urlsplit

from pydantic import Field, model_validator

from harbortrainer.config.algo_table import Algo
from harbortrainer.config.sampling_table import EvalSampling, TrainSampling
from harbortrainer.config.source_table import EvalSource, SourceConfig, TrainSource
from harbortrainer.config.table import Table, TomlTable


def _unique_names(sources: Iterable[SourceConfig], kind: str) -> None:
    name, count = Counter(source.resolved_name for source in sources).most_common(1)[0]
    if count > 1:
        raise ValueError(f"two {kind} sources are named {name!r}; give each its own name")


class TrainConfig(Table):
    """`[orchestrator.train]`."""

    source: list[TrainSource] = Field(min_length=1)
    """Where training tasks come from."""

    sampling: TrainSampling = TrainSampling()
    """Sampling of every source that does not say otherwise."""

    filter_zero_advantages: Literal[True] = True
    """Leave out samples whose advantage is zero; they carry no signal. The embedded engine always does."""

    @model_validator(mode="after")
    def _inherit(self) -> Self:
        for source in self.source:
            source.sampling = source.sampling.inherit(self.sampling)
        _unique_names(self.source, "training")
        return self


class EvalConfig(Table):
    """`[orchestrator.eval]`: evaluation on held-out tasks, at the start, every `interval` steps, and at the end."""

    source: list[EvalSource] = Field(min_length=1)
    """Where held-out tasks come from."""

    sampling: EvalSampling = EvalSampling()
    """Sampling of every source that does not say otherwise."""

    num_examples: int = Field(-1, ge=-1)
    """Tasks of every source that does not say otherwise; -1 means all."""

    group_size: int = Field(1, ge=1)
    """Trials per task of every source that does not say otherwise."""

    interval: int = Field(100, ge=1)
    """Steps between two evaluations of every source that does not say otherwise."""

    skip_first_step: bool = False
    """Leave out the evaluation before the first step."""

    @model_validator(mode="after")
    def _inherit(self) -> Self:
        for source in self.source:
            source.sampling = source.sampling.inherit(self.sampling)
            for key in {"num_examples", "group_size", "interval"} - source.model_fields_set:
                setattr(source, key, getattr(self, key))
        _unique_names(self.source, "evaluation")
        return self


class Concurrency(Table):
    """`[orchestrator.concurrency]`."""

    max_inflight: int | None = Field(1024, ge=1)
    """Most trials in flight at once; none means no bound of its own."""


class PolicyClient(Table):
    """`[orchestrator.model.client]`: where the policy is served."""

    base_url: str = "http://localhost:8000/v1"
    """The server's address; the embedded sampler listens at this port when it is set, else at a free one."""

    @property
    def port(self) -> int:
        """Where the embedded sampler listens; 0, any free port, when the address was not asked for."""
        asked = "base_url" in self.model_fields_set
        return (urlsplit(self.base_url).port or 0) if asked else 0

    @model_validator(mode="after")
    def _is_here(self) -> Self:
        url = urlsplit(self.base_url)
        if url.hostname not in ("localhost", "127.0.0.1", "0.0.0.0"):
            do = "remove base_url, or run with --engine prime-rl"
            raise ValueError(
                f"{url.hostname} is another machine and the embedded engine serves the policy itself; {do}"
            )
        if url.port is None:
            raise ValueError(f"{self.base_url} names no port; write it as http://localhost:8000/v1, or remove base_url")
        return self


class ServedModel(Table):
    """`[orchestrator.model]`."""

    client: PolicyClient = PolicyClient()
    """Where the policy is served."""


class OrchestratorConfig(Table):
    """`[orchestrator]`."""

    algo: Algo = Algo()
    """The algorithm of every source that does not name its own."""

    model: ServedModel = ServedModel()
    """Where the policy is served."""

    train: TrainConfig
    """Training sources and their sampling."""

    eval: EvalConfig | None = None
    """Evaluation on held-out tasks; none means never."""

    renderer: TomlTable = Field(default_factory=lambda: {"name": "auto"})
    """The `renderers` package's own table: which chat format turns messages into tokens. As written."""

    concurrency: Concurrency = Concurrency()
    """Bounds on the trials in flight."""

    batch_size: int = Field(128, ge=1)
    """Samples of one training step."""

    group_size: int = Field(1, ge=1)
    """Trials per task; their mean reward is the baseline."""

    max_off_policy_steps: int = Field(8, ge=0)
    """Most policy versions between the one that sampled and the one that trains; older trials are dropped."""

    @model_validator(mode="after")
    def _batching(self) -> Self:
        if self.batch_size % self.group_size:
            raise ValueError(f"batch_size ({self.batch_size}) must be a multiple of group_size ({self.group_size})")
        most = self.concurrency.max_inflight
        if most is not None and most < self.group_size:
            raise ValueError(f"concurrency.max_inflight ({most}) must be at least group_size ({self.group_size})")
        for source in self.train.source:
            if "group_size" not in source.model_fields_set:
                source.group_size = self.group_size
        return self
