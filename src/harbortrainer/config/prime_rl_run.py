"""Run file for the Prime-RL engine: the keys that our checks and launcher need, with Prime-RL's defaults.

Names and defaults come from the pinned schema (`prime_rl/configs/{rl,orchestrator,trainer,inference}.py` at
559b44772). Contract: other keys are ignored here; `rl` itself reads and checks the whole file.
"""

from collections.abc import Iterable, Iterator
from functools import reduce
from pathlib import Path
from typing import Literal, Self

from pydantic import Field, ValidationError, model_validator

from harbortrainer.config.algorithm_config import NamedAlgo
from harbortrainer.config.explain import explain
from harbortrainer.config.orchestrator_config import Concurrency, SourceConfig
from harbortrainer.config.plugin import PluginEnv, all_unknown_keys, plugin_env, plugin_errors
from harbortrainer.config.prime_rl_key_names import Release
from harbortrainer.config.prime_rl_releases import to_newer
from harbortrainer.config.prime_rl_schema import OWN_KEYS, SHARED, key_errors, known_keys, longest, pin_errors
from harbortrainer.config.reader import RawRun
from harbortrainer.config.runfile import RunBasics, RunConfig, VllmConfig
from harbortrainer.config.table import Table, lookup, with_value
from harbortrainer.config.trainer_table import (
    ConstantScheduler,
    LoraSettings,
    SchedulerSettings,
    check_scheduler,
    schedule_note,
)
from harbortrainer.errors import UserError, joined

LIFTED = ("model.name", "seq_len")
"""Keys of `RunBasics` that Prime-RL also accepts in other tables."""


class Deployment(Table):
    """`[deployment]` on one node."""

    num_train_gpus: int = 1
    num_infer_gpus: int = 1


class InferenceServer(Table):
    """`[inference.server]`."""

    port: int = 8000


class PrimeVllm(VllmConfig):
    """`[inference.vllm]`."""

    tensor_parallel_size: int = 1
    reasoning_parser: str | None = "auto"
    max_lora_rank: int | None = None


class PrimeInference(Table):
    """`[inference]`; without this table Prime-RL starts no server."""

    server: InferenceServer = InferenceServer()
    vllm: PrimeVllm = PrimeVllm()


class Monitors(Table):
    """`[monitors]` of the run, trainer or orchestrator."""

    wandb: dict[str, object] | None = None


class PrimeTrainedModel(Table):
    """`[trainer.model]`."""

    lora: LoraSettings | None = None
    optimization_dtype: Literal["float32", "bfloat16"] = "float32"


class PrimeOptim(Table):
    """`[trainer.optim]`: values that Prime-RL accepts although they prevent learning."""

    lr: float | None = Field(None, ge=0)
    betas1: float | None = Field(None, ge=0, lt=1)
    betas2: float | None = Field(None, ge=0, lt=1)


class PrimeCkpt(Table):
    """`[ckpt]` of the run or the trainer."""

    output_dir: Path | None = None


class PrimeTrainer(Table):
    """`[trainer]`."""

    ckpt: PrimeCkpt | None = None
    optim: PrimeOptim = PrimeOptim()
    scheduler: SchedulerSettings = ConstantScheduler()
    model: PrimeTrainedModel = PrimeTrainedModel()
    monitors: Monitors = Monitors()


class PrimeSampling(Table):
    """`[orchestrator.train.sampling]`."""

    max_completion_tokens: int | None = None


class PrimeSource(SourceConfig):
    """An entry of `[[orchestrator.train.source]]` or `[[orchestrator.eval.source]]`."""

    num_examples: int = -1
    algo: NamedAlgo | None = None


class PrimeSources(Table):
    """`[orchestrator.train]` and `[orchestrator.eval]`."""

    source: list[PrimeSource] = Field(default_factory=list)
    sampling: PrimeSampling = PrimeSampling()


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
    """A run of the Prime-RL engine."""

    max_steps: int | None = None
    ckpt: PrimeCkpt | None = None
    deployment: Deployment = Deployment()
    inference: PrimeInference | None = None
    monitors: Monitors = Monitors()
    orchestrator: PrimeOrchestrator = PrimeOrchestrator()
    resume: dict[str, object] | None = None
    slurm: dict[str, object] | None = None
    tokenizer: dict[str, object] = Field(default_factory=dict)
    trainer: PrimeTrainer = PrimeTrainer()

    @model_validator(mode="after")
    def _name_the_run(self) -> Self:
        self.name_after(self.orchestrator.train.source)
        return self

    @model_validator(mode="after")
    def _check_scheduler(self) -> Self:
        """Refuse what the trainer would refuse after its start."""
        scheduler = self.trainer.scheduler
        check_scheduler(scheduler, self.max_steps)
        if note := schedule_note(scheduler, self.max_steps):
            do = "set trainer.scheduler.decay_steps to the steps that follow the warm-up"
            raise ValueError(f"Prime-RL does not shorten a decay: {note}; {do}")
        return self


def prime_run(raw: RawRun, *, release: Release = "pin", resume: bool = False, dry_run: bool = False) -> PrimeRun:
    """Validate a run file for the Prime-RL engine.

    Args:
        raw: The file, with overrides applied.
        release: The Prime-RL that is there. A newer one than the pinned commit checks its own keys by itself.
        resume: Whether the run is resumed.
        dry_run: Whether `rl` only checks its file.

    Raises:
        UserError: A key is unknown, a value is invalid, or Prime-RL does not support a setting.
    """
    errors = list(refusals(raw, resume=resume, dry_run=dry_run))
    if release == "pin":
        errors = [*raw.untranslated, *key_errors(raw.data, raw.file), *pin_errors(raw.data, raw.file), *errors]
    elif raw.release == "pin" and not raw.assumed:
        errors = [*key_errors(raw.data, raw.file), *errors]
        try:
            to_newer(raw.data, raw.file)
        except UserError as error:
            errors.append(error)
    lifted = [(top, raw.get(key)) for key, top in SHARED.items() if top in LIFTED and raw.get(key) is not None]
    run = None
    try:
        data = reduce(lambda tables, pair: with_value(tables, *pair), lifted, raw.data)
        run = PrimeRun.model_validate(data, extra="ignore")
    except ValidationError as error:
        errors.append(explain(error, raw.file, known=known_keys()))
    except KeyError:
        assert errors, "a parent that is no table is an error of its type"
    errors += plugin_errors(raw.data, raw.file)
    if errors:
        raise joined([*errors, *all_unknown_keys(raw.data, raw.file)]) or errors[0]
    assert run is not None
    return run


def refusals(raw: RawRun, *, resume: bool, dry_run: bool) -> Iterator[UserError]:
    """Yield errors: keys of the embedded engine, a resume without a run name, a dry run that cleans."""
    for override in raw.overrides:
        if longest(override.key, OWN_KEYS - {"transcripts_mb"}):
            where = f"command line: {override.words[0]}"
            yield UserError("needs the embedded engine", where=where, do="leave it out")
    if dry_run and raw.get("clean"):
        do = "remove clean or --dry-run"
        yield UserError("clean would delete the run's folder in a dry run", where=f"{raw.file}: clean", do=do)
    if raw.get("warmup") is not None:
        do = "run `harbortrainer warmup` first, set [model] name to its folder, and remove [warmup]"
        yield UserError("[warmup] needs the embedded engine", where=f"{raw.file}: warmup", do=do)
    if raw.get("model.quantization") is not None:
        do = "remove it, or run with --engine local"
        yield UserError("needs the embedded engine", where=f"{raw.file}: model.quantization", do=do)
    if resume and raw.get("run.name") is None:
        do = 'set [run] name = "..." or pass --run.name'
        yield UserError("--resume needs the name of the run", where=f"{raw.file}: run.name", do=do)


def sources_of(run: RunConfig | PrimeRun) -> dict[str, SourceConfig]:
    """Return training and evaluation sources by dotted key."""
    tables = {"train": run.orchestrator.train, "eval": run.orchestrator.eval}
    return {
        f"orchestrator.{kind}.source[{index}]": source
        for kind, table in tables.items()
        for index, source in enumerate(table.source if table else ())
    }


def trial_folders(sources: Iterable[SourceConfig], trials: Path) -> list[Path]:
    """Return the absolute folders in which sources have their trials.

    Args:
        sources: The sources.
        trials: The run's own folder of trials, for sources without `trials_dir`.
    """
    named = [lookup(source.env, "agent.harness.trials_dir") for source in sources]
    return list(dict.fromkeys(Path(str(folder or trials)).resolve() for folder in named))


def plugin_envs(run: RunConfig | PrimeRun, file: str) -> dict[str, PluginEnv]:
    """Return our plugin's keys by the dotted key of their `env` table.

    Raises:
        UserError: A value is invalid.
    """
    tables = {f"{key}.env": source.env for key, source in sources_of(run).items()}
    found = {key: plugin_env(env, file=file, key=key) for key, env in tables.items()}
    return {key: env for key, env in found.items() if env is not None}
