"""`[orchestrator]`: task sources, sampling and batches.

Names, defaults and meaning are Prime-RL's (`prime_rl/configs/orchestrator.py`).

- Sampling: training samples from the model's whole distribution at one temperature, because log-probabilities and
  importance ratios refer to that distribution. Evaluation may restrict it.
- Sources: the `env` and `serve` tables belong to verifiers and the plugin. They are kept as written and checked by
  verifiers' own classes (`harbortrainer.doctor.verifiers_config`).
"""

from collections import Counter
from collections.abc import Iterable
from typing import Literal, Self
from urllib.parse import urlsplit

from pydantic import Field, model_validator

from harbortrainer.config.algorithm_config import Algo, CurriculumConfig
from harbortrainer.config.table import Table, TomlTable, lookup

TRAIN_EXTRA = {"top_k": -1, "min_p": 0.0, "return_token_ids": True}
"""Fields that Prime-RL adds to every training request: sample from the whole distribution, return token ids."""

APPENDING_TEMPLATE: TomlTable = {
    "name": "custom",
    "import_path": "harbortrainer.environment.appending_template.AppendingTemplate",
}
"""Table `renderer` for a model's own template, turn by turn."""


class TrainSampling(Table):
    """`[orchestrator.train.sampling]`."""

    temperature: float = Field(1.0, gt=0, le=2.0)
    """Sampling temperature. Log-probabilities refer to the distribution at this temperature."""

    max_completion_tokens: int | None = Field(None, ge=1)
    """Maximum tokens of an answer; null means up to the context limit."""

    def to_sampling_args(self) -> dict[str, object]:
        """Return the request settings under the names that Prime-RL passes to verifiers."""
        args = self.model_dump(exclude_none=True)
        return args | {"top_p": 1.0, "logprobs": True, "extra_body": dict(TRAIN_EXTRA)}


class EvalSampling(Table):
    """`[orchestrator.eval.sampling]`; for null the server's default holds."""

    temperature: float | None = Field(None, ge=0, le=2.0)
    """Sampling temperature; by default the server's 1.0. At 0 the most likely token is taken."""

    top_p: float | None = Field(None, gt=0, le=1)
    """Sample from the most likely tokens whose probabilities sum to this value."""

    top_k: int | None = Field(None, ge=-1)
    """Sample from this number of most likely tokens; -1 means all."""

    min_p: float | None = Field(None, ge=0, le=1)
    """Exclude tokens below this fraction of the most likely token's probability."""

    max_completion_tokens: int | None = Field(None, ge=1)
    """Maximum tokens of an answer; null means up to the context limit."""

    def to_sampling_args(self) -> dict[str, object]:
        """Return the request settings that were set, under the names that Prime-RL passes to verifiers."""
        args = self.model_dump(include={"temperature", "top_p", "max_completion_tokens"}, exclude_none=True)
        extra = self.model_dump(include={"top_k", "min_p"}, exclude_none=True)
        return args | ({"extra_body": extra} if extra else {})


def source_name(name: object, env: TomlTable) -> str:
    """Return the name of a source: the given one, or the ids of its environment."""
    return str(name or "+".join(str(part) for key in ("id", "taskset.id") if (part := lookup(env, key))))


class SourceConfig(Table):
    """Common keys of training and evaluation sources."""

    env: TomlTable
    """`env` table of verifiers: taskset, agent (harness, runtime, max_turns), timeouts. Passed on as written."""

    serve: TomlTable = Field(default_factory=dict)
    """`serve` table of verifiers: the pool of env server workers and the trials of each. Passed on as written."""

    name: str | None = Field(None, min_length=1)
    """Name in logs and metrics; by default the taskset's id."""

    ratio: float = Field(1.0, gt=0)
    """Weight of this source relative to the others."""

    @property
    def resolved_name(self) -> str:
        """The name in logs and metrics."""
        return source_name(self.name, self.env)

    @model_validator(mode="after")
    def _check_taskset(self) -> Self:
        taskset = self.env.get("taskset")
        if not self.env.get("id") and not (isinstance(taskset, dict) and taskset.get("id")):
            raise ValueError('has no environment; set env.taskset.id = "harbor_env"')
        return self


class TrainSource(SourceConfig):
    """`[[orchestrator.train.source]]`."""

    sampling: TrainSampling = TrainSampling()
    """Sampling of this source; unset keys come from `[orchestrator.train.sampling]`."""

    group_size: int = Field(1, ge=1)
    """Trials per task; by default `orchestrator.group_size`."""

    algo: Algo | None = None
    """Algorithm of this source; by default `orchestrator.algo`."""

    curriculum: CurriculumConfig | None = None
    """Task sampling and group filters; by default each task once per epoch, without filters."""


class EvalSource(SourceConfig):
    """`[[orchestrator.eval.source]]`; unset keys come from `[orchestrator.eval]`."""

    sampling: EvalSampling = EvalSampling()
    """Sampling of this source; unset keys come from `[orchestrator.eval.sampling]`."""

    num_examples: int = Field(-1, ge=-1)
    """Number of tasks to evaluate; -1 means all."""

    group_size: int = Field(1, ge=1)
    """Trials per task."""

    interval: int = Field(100, ge=1)
    """Steps between evaluations."""


def _unique_names(sources: Iterable[SourceConfig], kind: str) -> None:
    name, count = Counter(source.resolved_name for source in sources).most_common(1)[0]
    if count > 1:
        raise ValueError(f"two {kind} sources are named {name!r}; give each its own name")


class TrainConfig(Table):
    """`[orchestrator.train]`."""

    source: list[TrainSource] = Field(min_length=1)
    """Sources of training tasks."""

    sampling: TrainSampling = TrainSampling()
    """Default sampling of the sources."""

    filter_zero_advantages: Literal[True] = True
    """Drop samples with an advantage of zero, which carry no signal. Always on for the embedded engine."""

    @model_validator(mode="after")
    def _inherit(self) -> Self:
        for source in self.source:
            source.sampling = source.sampling.inherit(self.sampling)
        _unique_names(self.source, "training")
        return self


class EvalConfig(Table):
    """`[orchestrator.eval]`: evaluation on held-out tasks, at the start, every `interval` steps, and at the end."""

    source: list[EvalSource] = Field(min_length=1)
    """Sources of held-out tasks."""

    sampling: EvalSampling = EvalSampling()
    """Default sampling of the sources."""

    num_examples: int = Field(-1, ge=-1)
    """Default number of tasks per source; -1 means all."""

    group_size: int = Field(1, ge=1)
    """Default number of trials per task."""

    interval: int = Field(100, ge=1)
    """Default number of steps between evaluations."""

    skip_first_step: bool = False
    """Skip the evaluation before the first step."""

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
    """Maximum number of trials in flight; null means no limit."""


class PolicyClient(Table):
    """`[orchestrator.model.client]`: address of the served policy."""

    base_url: str = "http://localhost:8000/v1"
    """Address of the server. The embedded sampler listens there if it is set, else on a free port of this machine."""

    @property
    def port(self) -> int:
        """Port of the embedded sampler; 0 (any free port) if the address is not set."""
        is_set = "base_url" in self.model_fields_set
        return (urlsplit(self.base_url).port or 0) if is_set else 0

    @property
    def host(self) -> str:
        """Address or name that the embedded sampler listens on."""
        host = urlsplit(self.base_url).hostname or ""
        return "127.0.0.1" if host in ("localhost", "0.0.0.0") else host

    @model_validator(mode="after")
    def _check_port(self) -> Self:
        url = urlsplit(self.base_url)
        if not url.hostname or url.port is None:
            raise ValueError(f"{self.base_url} has no port; use e.g. http://localhost:8000/v1, or remove base_url")
        return self


class ServedModel(Table):
    """`[orchestrator.model]`."""

    client: PolicyClient = PolicyClient()
    """Address of the served policy."""


class OrchestratorConfig(Table):
    """`[orchestrator]`."""

    algo: Algo = Algo()
    """Default algorithm of the sources."""

    model: ServedModel = ServedModel()
    """Address of the served policy."""

    train: TrainConfig
    """Training sources and their sampling."""

    eval: EvalConfig | None = None
    """Evaluation on held-out tasks; by default none."""

    renderer: TomlTable = Field(default_factory=lambda: {"name": "auto"})
    """Table of the `renderers` package: the chat format. `auto` has a format for some model names. On the embedded
    engine, another model has its own template, turn by turn."""

    concurrency: Concurrency = Concurrency()
    """Limits on the trials in flight."""

    batch_size: int = Field(128, ge=1)
    """Trials per training step, a multiple of `group_size`."""

    group_size: int = Field(1, ge=1)
    """Trials per task. Their mean reward is the baseline."""

    max_off_policy_steps: int = Field(8, ge=0)
    """Maximum number of policy versions between sampling and training; older trials are dropped."""

    @model_validator(mode="after")
    def _check_batch(self) -> Self:
        if self.batch_size % self.group_size:
            raise ValueError(f"batch_size ({self.batch_size}) must be a multiple of group_size ({self.group_size})")
        limit = self.concurrency.max_inflight
        if limit is not None and limit < self.group_size:
            raise ValueError(f"concurrency.max_inflight ({limit}) must be at least group_size ({self.group_size})")
        for source in self.train.source:
            if "group_size" not in source.model_fields_set:
                source.group_size = self.group_size
        return self

    @model_validator(mode="after")
    def _check_aggregation(self) -> Self:
        found = {(source.algo or self.algo).loss_aggregation for source in self.train.source}
        if len(found) > 1:
            raise ValueError(f"sources have different loss_aggregation ({', '.join(sorted(found))}); set one for all")
        return self
