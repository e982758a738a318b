"""`harbortrainer warmup`: fine-tune a model on solutions or on a run's successful trials."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from pydantic import ValidationError

from harbortrainer.config.explain import explain
from harbortrainer.config.overrides import apply, parse, setting_location
from harbortrainer.config.prime_rl_schema import OWN_KEYS
from harbortrainer.config.reader import from_raw, read
from harbortrainer.config.run_sections import WarmupConfig
from harbortrainer.config.runfile import RunConfig
from harbortrainer.doctor import verifiers_config
from harbortrainer.doctor.finding import stop_on_red
from harbortrainer.doctor.model_files import check_warmup
from harbortrainer.doctor.preflight import check_model
from harbortrainer.engines.engine_choice import require_extra
from harbortrainer.engines.model_folder import check_model_folder
from harbortrainer.errors import UserError
from harbortrainer.runs.display import loading
from harbortrainer.runs.good_trials import require_rollout_files
from harbortrainer.runs.provenance import base_policy

_OPTIONS = {"model": "--model", "tasks": "--tasks", "run": "--from"}
"""Options of the command, by the key of `[warmup]` that they set."""


def warm_up(
    file: Path | None,
    words: Sequence[str],
    out: Path,
    *,
    model: str | None,
    tasks: Path | None,
    run: Path | None = None,
) -> Path:
    """Fine-tune a model as `[warmup]` says, or on tasks or a run's trials; returns its folder."""
    given = {key: value for key, value in {"model": model, "tasks": tasks, "run": run}.items() if value is not None}
    for key in given if file else ():
        do = f"use --warmup.{key}, or leave out --config"
        raise UserError("this option is for a warm-up without a run file", where=_OPTIONS[key], do=do)
    run_file = _read_run_file(file, words) if file else None
    config, seed = _config_of_options(words, given) if run_file is None else (run_file.warmup, run_file.seed)
    assert config is not None
    if config.run is not None:
        check_trials(config.run, config.model)
    if config.model is not None:
        check_model(config.model, "warmup.model" if file else "--model")
    require_extra("torch", "transformers", "peft")
    with loading("torch", "torch"):
        from harbortrainer.warmup.warmup import rollouts_of
        from harbortrainer.warmup.warmup import warm_up as make

    return make(config, out, rollouts=rollouts_of(run_file) if run_file else None, seed=seed)


def _read_run_file(file: Path, words: Sequence[str]) -> RunConfig:
    """Read a run file that has a `[warmup]`."""
    raw = read(file, words)
    with raw.locating_errors():
        config = from_raw(raw)
        if config.warmup is None:
            raise UserError("no [warmup] in this file", where=str(file), do="add one, or see configs/quickstart.toml")
        stop_on_red(list(check_warmup(config.warmup, lambda key: setting_location(raw.file, key, raw.overrides))))
        verifiers_config.check(config, raw.file)
    return config


def check_trials(run: Path, model: str | None) -> None:
    """Raise `UserError` when a run has no trials or no model to start from. Imports nothing slow."""
    require_rollout_files(run)
    if model is None:
        check_model_folder(base_policy(run))


def _config_of_options(words: Sequence[str], options: Mapping[str, object]) -> tuple[WarmupConfig, int]:
    """Return the table and the seed of a command without a run file.

    Args:
        words: Overrides, such as `--warmup.steps 50`.
        options: Values of the command's own options, by key.
    """
    found = parse(words)
    for override in found:
        if override.key.split(".")[0] not in OWN_KEYS:
            where = f"command line: {override.words[0]}"
            raise UserError("this option overrides a run file's key", where=where, do="add --config FILE")
    given = apply({"warmup": dict(options)}, found)
    if "run" not in options and not {"model", "tasks"} <= options.keys():
        do = "pass --config, --model and --tasks, or --from RUN"
        raise UserError("no training data given", where="harbortrainer warmup", do=do)
    if {"run", "tasks"} <= options.keys():
        raise UserError("two sources of training data", where="--tasks, --from", do="leave one out")
    try:
        config = WarmupConfig.model_validate(given["warmup"])
    except ValidationError as error:
        raise explain(error, "command line", prefix="--warmup") from None
    overridden = {override.key for override in found}

    def option(key: str) -> str:
        name = key.removeprefix("warmup.")
        own = name in options and key not in overridden
        return f"command line: {_OPTIONS[name] if own else f'--{key}'}"

    stop_on_red(list(check_warmup(config, option)))
    return config, int(given.get("seed", 0))
