"""Provenance of a run: fingerprints of the policy's files and the tasks, and package versions.

A run writes its provenance to `made_of.json` when it starts and compares it at `--resume`. Changed weights or tasks are
refused; changed packages cause a warning. `base_policy` reads from a run's config which model it started from; configs
of other releases are read as plain data. Invariant: a fingerprint depends only on contents, not on times or paths.
"""

import hashlib
import json
import os
import tomllib
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import BinaryIO, cast

from pydantic import BaseModel, ValidationError

from harbortrainer.config.orchestrator_config import source_name
from harbortrainer.config.table import TomlTable, lookup
from harbortrainer.errors import UserError
from harbortrainer.runs.durable import write_whole
from harbortrainer.runs.prime_rl_files import CONFIG_TABLES, WHOLE_CONFIG, config_files

FILE = "made_of.json"
PACKAGES = ("harbortrainer", "harbor", "verifiers", "torch", "transformers", "peft")
FINGERPRINTED = {".safetensors", ".bin", ".pt", ".json", ".jinja", ".model", ".txt"}
"""Suffixes of the files that affect a model's output: weights, configs, tokenizer, chat template."""
WHOLE_MB, BLOCKS, BLOCK = 64, 64, 1 << 16
"""Files up to `WHOLE_MB` are hashed whole; of larger ones `BLOCKS + 1` evenly spaced blocks of `BLOCK` bytes."""

HUB_TIMEOUT_S = 5.0


class TaskOrigin(BaseModel):
    """Origin of the tasks of a source."""

    source: str
    """A folder, or a pinned source."""
    left_out: list[str] = []
    """Errors of the tasks that `skip_bad` left out."""


class Provenance(BaseModel):
    """The provenance of a run."""

    weights: dict[str, str] = {}
    """Fingerprint of each file of the base policy."""
    tasks: dict[str, dict[str, str]] = {}
    """Content key of each task, by source and name; a source's key on Prime-RL is the dotted one of its `env`."""
    origins: dict[str, TaskOrigin] = {}
    """Origin of these tasks, by source."""
    packages: dict[str, str] = {}
    """Package versions."""


def collect_provenance(
    model: str, tasks: Mapping[str, Mapping[str, str]], origins: Mapping[str, TaskOrigin] | None = None
) -> Provenance:
    """Collect the current provenance of a run. Requests the commit of a hub model that is not in the cache.

    Args:
        model: The policy's folder or hub id.
        tasks: Content keys by source and task name.
        origins: Origins by source.
    """
    return Provenance(
        weights=fetched_fingerprints(model),
        tasks={name: dict(own) for name, own in tasks.items()},
        origins=dict(origins or {}),
        packages=package_versions(),
    )


def package_versions() -> dict[str, str]:
    """Return the installed versions of the packages that affect results."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def model_fingerprints(model: str) -> dict[str, str]:
    """Return the fingerprint of each file of a model folder; for a hub id, the cached commit."""
    folder = Path(model)
    if not folder.is_dir():
        commits = hub_folder(model) / "refs" / "main"
        return {"commit": commits.read_text(encoding="utf-8").strip()} if commits.is_file() else {}
    files = sorted(path for path in folder.iterdir() if path.suffix in FINGERPRINTED and path.is_file())
    return {path.name: fingerprint(path) for path in files}


def fetched_fingerprints(model: str) -> dict[str, str]:
    """Return a model's fingerprints; for a hub id without a cached commit, the commit that the hub names now.

    The result is empty if the hub does not answer: whoever loads the model reports it.
    """
    known = model_fingerprints(model)
    if known or Path(model).is_dir():
        return known
    import httpx  # slow to import, as is the hub's client

    with suppress(ImportError, OSError, ValueError, httpx.HTTPError):
        from huggingface_hub import HfApi

        if commit := HfApi().model_info(model, timeout=HUB_TIMEOUT_S).sha:
            return {"commit": commit}
    return {}


def hub_folder(model: str) -> Path:
    """Return the cache folder of a hub model (`refs/`, `snapshots/`) by huggingface_hub's rules, existing or not."""
    home = os.environ.get("HF_HOME") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface"
    cache = os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE") or Path(home) / "hub"
    return Path(cache).expanduser() / f"models--{model.replace('/', '--')}"


def fingerprint(path: Path) -> str:
    """Hash a file's size and contents; for a large file, evenly spaced blocks of it."""
    size = path.stat().st_size
    digest = hashlib.sha256(str(size).encode())
    with path.open("rb") as file:
        if size <= WHOLE_MB << 20:
            hashlib.file_digest(file, lambda: digest)
        else:
            _blocks(file, size, digest.update)
    return digest.hexdigest()[:32]


def _blocks(file: BinaryIO, size: int, update: Callable[[bytes], object]) -> None:
    for number in range(BLOCKS + 1):
        file.seek((size - BLOCK) * number // BLOCKS)
        update(file.read(BLOCK))


def check_provenance(folder: Path, now: Provenance, *, resume: bool) -> list[str]:
    """Write the provenance of a new run; for a resumed run, compare it with the recorded one.

    Returns:
        Warnings about changed packages.

    Raises:
        UserError: The weights or the tasks have changed.
    """
    path = folder / FILE
    before = _read(path) if resume else None
    notes = []
    if before is not None:
        change = first_change(before.weights, now.weights) if before.weights else None  # empty: it was not known
        _refuse(path, "the policy's files", change)
        for source in before.tasks.keys() | now.tasks.keys():
            change = first_change(before.tasks.get(source, {}), now.tasks.get(source, {}))
            _refuse(path, f"the tasks of source {source!r}", change)
        notes = package_notes(before.packages, now.packages)
    if before != now:
        write_whole(path, now.model_dump_json(indent=2) + os.linesep)
    return notes


def first_change(before: Mapping[str, str], now: Mapping[str, str]) -> str | None:
    """Describe the first name whose fingerprint differs; None if all are equal."""
    for name in sorted(before.keys() | now.keys()):
        if before.get(name) != now.get(name):
            return f"{name} {'was added' if name not in before else 'is missing' if name not in now else 'differs'}"
    return None


def package_notes(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Return a warning about changed packages; empty if there are none."""
    changes = [
        f"{name} {before.get(name, 'absent')} -> {now.get(name, 'absent')}"
        for name in sorted(before.keys() | now.keys())
        if before.get(name) != now.get(name)
    ]
    return (
        [f"warning: package versions have changed since the last start of this run: {', '.join(changes)}"]
        if changes
        else []
    )


def _refuse(path: Path, what: str, change: str | None) -> None:
    if change is not None:
        raise UserError(
            f"{what} have changed since this run was started: {change}",
            where=str(path),
            do="restore them, or start a new run with another run.name",
        )


def _read(path: Path) -> Provenance | None:
    """Read the provenance of a run; None for a run of a release that wrote none."""
    try:
        return Provenance.model_validate(json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return None
    except (ValueError, ValidationError, RecursionError) as error:
        raise UserError(
            "cannot be read", where=str(path), do="restore the file, or remove it to continue without the comparison"
        ) from error


LOCAL_CONFIG = "config.toml"


def engine_of(run: Path) -> str:
    """Return the engine of a run, `local` or `prime-rl`. Raises `UserError` if the folder has no config of either."""
    if engine := find_engine(run):
        return engine
    what = f"no run here (neither {LOCAL_CONFIG} nor configs/{CONFIG_TABLES[0]}.json)"
    raise UserError(what, where=str(run), do="pass a run folder, e.g. outputs/NAME")


def find_engine(run: Path) -> str | None:
    """Return the engine of a run, `local` or `prime-rl`; None if the folder has no config of either."""
    return "local" if (run / LOCAL_CONFIG).is_file() else "prime-rl" if config_files(run) else None


def run_config(run: Path) -> TomlTable:
    """Read the resolved config of a run of either engine. Raises `UserError` if there is no readable config."""
    engine = engine_of(run)
    if engine == "local":
        return read_config(run / LOCAL_CONFIG)
    found: TomlTable = {name: read_config(file) for name, file in config_files(run).items()}
    whole = found.get(WHOLE_CONFIG)
    return {name: whole[name] for name in CONFIG_TABLES if name in whole} if isinstance(whole, dict) else found


def read_config(file: Path) -> TomlTable:
    """Read a config in TOML or JSON. Raises `UserError` if it cannot be read."""
    try:
        text = file.read_text(encoding="utf-8")
        config: object = tomllib.loads(text) if file.suffix == ".toml" else json.loads(text)
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"cannot be read ({error})", where=str(file), do="restore the file") from None
    if not isinstance(config, dict):
        raise UserError("is not a config", where=str(file), do="restore the file")
    return cast(TomlTable, config)


def base_policy(run: Path) -> str:
    """Return the folder or hub id of the policy that a run started from.

    Raises:
        UserError: The config does not name it, or its folder no longer exists.
    """
    named = named_model(run)
    if not Path(named).is_dir() and any("." in name for name in base_policy_files(run)):
        do = "restore it, or pass another model"
        raise UserError("the model that the run started from no longer exists", where=named, do=do)
    return named


def base_policy_files(run: Path) -> dict[str, str]:
    """Return the recorded fingerprints of a run's base policy; for a hub id, its commit."""
    return _recorded(run).weights


def _recorded(run: Path) -> Provenance:
    """Return a run's recorded provenance; an empty one if there is none."""
    for file in (run / FILE, run / "configs" / FILE):
        try:
            return Provenance.model_validate_json(file.read_bytes())
        except (OSError, ValueError):
            continue
    return Provenance()


def evaluation_key(name: str, trained: Collection[str]) -> str:
    """Return the key of an evaluation source in a provenance: its name, marked if a training source has the same."""
    return f"{name} (evaluation)" if name in trained else name


def evaluated_training_tasks(run: Path) -> tuple[int, int]:
    """Return how many of a run's evaluated tasks it also trains on, and how many it evaluates; 0 if not recorded."""
    try:
        config = run_config(run)
    except UserError:
        return 0, 0
    tasks = _recorded(run).tasks
    train, held_out = (_recorded_sources(tasks, config, kind) for kind in ("train", "eval"))
    trained = {key for name in train for key in tasks.get(name, {}).values()}
    evaluated = {key for name in held_out for key in tasks.get(evaluation_key(name, train), {}).values()}
    return len(trained & evaluated), len(evaluated)


def _recorded_sources(tasks: Collection[str], config: TomlTable, kind: str) -> list[str]:
    """Return the names of the training or evaluation sources; on Prime-RL a provenance has their dotted keys."""
    table = f"orchestrator.{kind}.source"
    sources = lookup(config, table)
    named = [source_name(one.get("name"), one.get("env") or {}) for one in sources] if isinstance(sources, list) else []
    return [key for key in tasks if key.startswith(f"{table}[")] or named


def evaluation_name(run: Path) -> str:
    """Return what a run's evaluations are called: "held-out", or "evaluation" if it also trains on their tasks."""
    return "evaluation" if evaluated_training_tasks(run)[0] else "held-out"


def named_model(run: Path) -> str:
    """Return the name of the base policy in a run's config. Raises `UserError` if it has none."""
    config = run_config(run)
    if config.get("warmup"):
        return str(run.absolute() / "model")
    named = lookup(config, "model.name") or lookup(config, "trainer.model.name")
    if not isinstance(named, str) or not named:
        do = "restore model.name in its config"
        raise UserError("the config does not name the model", where=str(run), do=do)
    return named
