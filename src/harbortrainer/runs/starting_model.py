"""Which model a run started from, by its config, read as plain data: a run of another release is read too."""

import json
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import cast

from harbortrainer.config.table import TomlTable
from harbortrainer.errors import UserError
from harbortrainer.runs.ingredients import FILE, Ingredients

LOCAL_CONFIG, PRIME_CONFIG = "config.toml", "configs/rl.json"


def run_config(run: Path) -> TomlTable:
    """A run's resolved config, of either engine. Raises `UserError` when there is none that can be read."""
    file = run / LOCAL_CONFIG if (run / LOCAL_CONFIG).is_file() else run / PRIME_CONFIG
    if not file.is_file():
        what = f"no run here: neither {LOCAL_CONFIG} nor {PRIME_CONFIG}"
        raise UserError(what, where=str(run), do="name a run's folder, as outputs/RUN")
    try:
        text = file.read_text(encoding="utf-8")
        told: object = tomllib.loads(text) if file.suffix == ".toml" else json.loads(text)
    except (OSError, ValueError) as error:
        raise UserError(f"cannot be read ({error})", where=str(file), do="put it back as the run wrote it") from None
    if not isinstance(told, dict):
        raise UserError("is no config", where=str(file), do="put it back as the run wrote it")
    return cast(TomlTable, told)


def starting_model(run: Path) -> str:
    """The folder or hub id of the policy that a run began with.

    Raises:
        UserError: Nobody says which, or it was a folder that is gone.
    """
    named = named_model(run)
    if not Path(named).is_dir() and any("." in name for name in files_of_start(run)):
        do = "put it back, or name another"
        raise UserError("the model that the run started from is not there any more", where=named, do=do)
    return named


def files_of_start(run: Path) -> dict[str, str]:
    """The fingerprints of the files that a run started from, as it wrote them down; of a hub id its commit alone."""
    for file in (run / FILE, run / "configs" / FILE):
        try:
            return Ingredients.model_validate_json(file.read_bytes()).weights
        except (OSError, ValueError):
            continue
    return {}


def named_model(run: Path) -> str:
    """What a run's config calls the policy that it began with. Raises `UserError` when it does not say."""
    config = run_config(run)
    if config.get("warmup"):
        return str(run.absolute() / "model")
    model = config.get("model")
    named = model.get("name") if isinstance(model, Mapping) else None
    if not isinstance(named, str) or not named:
        do = "put model.name back as the run wrote it"
        raise UserError("does not say which model was trained", where=str(run), do=do)
    return named
