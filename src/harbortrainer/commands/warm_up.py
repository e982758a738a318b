"""`harbortrainer warmup`: make a policy by supervised training on solutions, or on a run's good trials."""

from collections.abc import Sequence
from pathlib import Path

from pydantic import ValidationError

from harbortrainer.config.explain import explain
from harbortrainer.config.fates import OURS
from harbortrainer.config.overrides import apply, parse, place
from harbortrainer.config.reader import from_raw, read
from harbortrainer.config.warmup_table import WarmupConfig
from harbortrainer.doctor import foreign_tables
from harbortrainer.doctor.finding import stop_on_red
from harbortrainer.doctor.model_files import made_by
from harbortrainer.engines.engine_choice import need_extra
from harbortrainer.engines.model_folder import check_folder
from harbortrainer.errors import UserError
from harbortrainer.runs.good_trials import rollout_files
from harbortrainer.runs.loading import loading
from harbortrainer.runs.starting_model import starting_model


def warm_up(
    file: Path | None,
    words: Sequence[str],
    out: Path,
    *,
    model: str | None,
    tasks: Path | None,
    run: Path | None = None,
) -> Path:
    """Make the policy that `[warmup]` describes, or one from tasks or a run's trials; returns its folder."""
    config, seed = _warmup_of(file, words) if file else _warmup_from_words(words, model, tasks, run)
    if config.run is not None:
        check_trials(config.run, config.model)
    need_extra("torch", "transformers", "peft")
    loading("torch and the model", "torch")
    from harbortrainer.warmup.warmup import warm_up as make

    return make(config, out, seed=seed)


def _warmup_of(file: Path, words: Sequence[str]) -> tuple[WarmupConfig, int]:
    raw = read(file, words)
    with raw.blaming():
        config = from_raw(raw)
        if config.warmup is None:
            raise UserError("no [warmup] in this file", where=str(file), do="add one, or see configs/quickstart.toml")
        stop_on_red(list(made_by(config.warmup, lambda key: place(raw.file, key, raw.overrides))))
        foreign_tables.check(config, raw.file)
    return config.warmup, config.seed


def check_trials(run: Path, model: str | None) -> None:
    """Raises `UserError` when there is nothing to learn from a run; nothing slow is imported."""
    if not rollout_files(run):
        do = "name a run's folder in which a step was finished"
        raise UserError("no trials of a run here", where=str(run / "rollouts"), do=do)
    if model is None:
        check_folder(starting_model(run))


def _warmup_from_words(
    words: Sequence[str], model: str | None, tasks: Path | None, run: Path | None
) -> tuple[WarmupConfig, int]:
    found = parse(words)
    for override in found:
        if override.key.split(".")[0] not in OURS:
            raise UserError("is about a run file", where=f"command line: {override.words[0]}", do="give --config too")
    told = {"model": model, "tasks": tasks, "run": run}
    given = apply({"warmup": {key: value for key, value in told.items() if value is not None}}, found)
    if run is None and (model is None or tasks is None):
        do = "give --config, --model and --tasks, or --from a run"
        raise UserError("nothing to learn from", where="harbortrainer warmup", do=do)
    try:
        config = WarmupConfig.model_validate(given["warmup"])
    except ValidationError as error:
        raise explain(error, "command line", prefix="--warmup") from None
    stop_on_red(list(made_by(config, lambda key: f"command line: --{key.removeprefix('warmup.')}")))
    return config, int(given.get("seed", 0))
