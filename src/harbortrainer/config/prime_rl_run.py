"""A run file as Prime-RL reads it: the keys that the checks and the launcher ask for, with Prime-RL's defaults.

The source of names and defaults is the pinned schema (`prime_rl/configs/{rl,orchestrator,trainer,inference}.py` at
559b44772). Contract: every other key is passed over here; `rl` itself reads and checks the whole file.
"""

from functools import reduce
from typing import Literal, Self

from pydantic import Field, ValidationError, model_validator

from harbortrainer.config.algo_table import NamedAlgo
from harbortrainer.config.explain import explain
from harbortrainer.config.fates import OURS, SHARED, longest
from harbortrainer.config.known_keys import check_known, known_keys
from harbortrainer.config.orchestrator_table import Concurrency
from harbortrainer.config.plugin import PluginEnv, plugin_env
from harbortrainer.config.reader import RawRun
from harbortrainer.config.runfile import RunBasics, RunConfig, VllmConfig
from harbortrainer.config.source_table import SourceConfig
from harbortrainer.config.table import Table, changed
from harbortrainer.config.trainer_table import LoraSettings
from harbortrainer.errors import UserError

LIFTED = ("model.name", "seq_len")
"""Settings of `RunBasics` that Prime-RL also takes in its parts."""


class Deployment(Table):
    """`[deployment]` on one node."""

    num_train_gpus: int = 1
    num_infer_gpus: int = 1


class InferenceServer(Table):
    """`[inference.server]`."""

    port: int = 8000


class ServedByVllm(VllmConfig):
    """`[inference.vllm]`."""

    tensor_parallel_size: int = 1
    reasoning_parser: str | None = "auto"
    max_lora_rank: int | None = None


class PrimeInference(Table):
    """`[inference]`; without it Prime-RL starts no server."""

    server: InferenceServer = InferenceServer()
    vllm: ServedByVllm = ServedByVllm()


class Monitors(Table):
    """`[monitors]` of the run or of one of its parts."""

    wandb: dict[str, object] | None = None


class PrimeTrainedModel(Table):
    """`[trainer.model]`."""

    lora: LoraSettings | None = None
    optimization_dtype: Literal["float32", "bfloat16"] = "float32"


class PrimeOptim(Table):
    """`[trainer.optim]`: numbers that Prime-RL would take although nothing can be learned with them."""

    lr: float | None = Field(None, ge=0)
    betas1: float | None = Field(None, ge=0, lt=1)
    betas2: float | None = Field(None, ge=0, lt=1)


class PrimeTrainer(Table):
    """`[trainer]`."""

    optim: PrimeOptim = PrimeOptim()
    model: PrimeTrainedModel = PrimeTrainedModel()
    monitors: Monitors = Monitors()


class AnswerLimit(Table):
    """`[orchestrator.train.sampling]`."""

    max_completion_tokens: int | None = None


class PrimeSource(SourceConfig):
    """An entry of `[[orchestrator.train.source]]` or `[[orchestrator.eval.source]]`."""

    num_examples: int = -1
    algo: NamedAlgo | None = None


class PrimeSources(Table):
    """`[orchestrator.train]` and `[orchestrator.eval]`."""

    source: list[PrimeSource] = Field(default_factory=list)
    sampling: AnswerLimit = AnswerLimit()


class PrimeOrchestrator(Table):
    """`[orchestrator]`."""

    train: PrimeSources = PrimeSources()
    eval: PrimeSources | None = None
    batch_size: int | None = Field(None, ge=1)
    group_size: int = Field(1, ge=1)
    concurrency: Concurrency = Concurrency()
    env_server_base_port: int = Field(5000, ge=1, le=65535)
    monitors: Monitors = Monitors()
    algo: NamedAlgo = NamedAlgo()
    renderer: dict[str, object] = Field(default_factory=dict)
    tokenizer: dict[str, object] = Field(default_factory=dict)


class PrimeRun(RunBasics):
    """A run on Prime-RL."""

    deployment: Deployment = Deployment()
    inference: PrimeInference | None = None
    monitors: Monitors = Monitors()
    orchestrator: PrimeOrchestrator = PrimeOrchestrator()
    slurm: dict[str, object] | None = None
    tokenizer: dict[str, object] = Field(default_factory=dict)
    trainer: PrimeTrainer = PrimeTrainer()

    @model_validator(mode="after")
    def _name_the_run(self) -> Self:
        self.name_after(self.orchestrator.train.source)
        return self


def prime_run(raw: RawRun, *, resume: bool = False, dry_run: bool = False) -> PrimeRun:
    """The reading of a file that was read already.

    Args:
        raw: The file, with the overrides applied.
        resume: The run is to go on.
        dry_run: `rl` is to check its file alone.

    Raises:
        UserError: A key that neither Prime-RL nor we know, a value that cannot be, or what Prime-RL cannot do.
    """
    check_known(raw.data, raw.file)
    refuse(raw, resume=resume, dry_run=dry_run)
    lifted = [(top, raw.get(key)) for key, top in SHARED.items() if top in LIFTED and raw.get(key) is not None]
    try:
        data = reduce(lambda tables, pair: changed(tables, *pair), lifted, raw.data)
        return PrimeRun.model_validate(data, extra="ignore")
    except ValidationError as error:
        raise explain(error, raw.file, known=known_keys()) from None


def refuse(raw: RawRun, *, resume: bool, dry_run: bool) -> None:
    """Refuse what Prime-RL cannot do with this file.

    Raises:
        UserError: What only the embedded engine knows, a run without a name to resume, or a dry run that would delete.
    """
    for override in raw.overrides:
        if longest(override.key, OURS):
            where = f"command line: {override.words[0]}"
            raise UserError("is for the embedded engine", where=where, do="leave it out")
    if dry_run and raw.get("clean"):
        do = "drop clean, or --dry-run"
        raise UserError("clean would delete the run's folder in a dry run", where=f"{raw.file}: clean", do=do)
    if raw.get("warmup") is not None:
        do = "run `harbortrainer warmup` first, name its folder in [model] name, and remove [warmup]"
        raise UserError("[warmup] is for the embedded engine", where=f"{raw.file}: warmup", do=do)
    if raw.get("model.quantization") is not None:
        do = "remove it, or run with --engine local"
        raise UserError("is for the embedded engine", where=f"{raw.file}: model.quantization", do=do)
    if resume and raw.get("run.name") is None:
        do = 'set [run] name = "..." or pass --run.name'
        raise UserError("a resume needs to know which run", where=f"{raw.file}: run.name", do=do)


def sources_of(run: RunConfig | PrimeRun) -> dict[str, SourceConfig]:
    """Training and evaluation sources by their dotted keys."""
    tables = {"train": run.orchestrator.train, "eval": run.orchestrator.eval}
    return {
        f"orchestrator.{kind}.source[{index}]": source
        for kind, table in tables.items()
        for index, source in enumerate(table.source if table else ())
    }


def plugin_envs(run: RunConfig | PrimeRun, file: str) -> dict[str, PluginEnv]:
    """Our plugin's keys by the dotted key of the `env` table they stand in.

    Raises:
        UserError: A value that cannot be.
    """
    tables = {f"{key}.env": source.env for key, source in sources_of(run).items()}
    found = {key: plugin_env(env, file=file, key=key) for key, env in tables.items()}
    return {key: env for key, env in found.items() if env is not None}
