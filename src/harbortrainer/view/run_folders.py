"""Readers of the three kinds of folders that the dashboard opens. They only read; the run's lock is left alone.

- `EmbeddedFolder`: a run of the embedded engine (`docs/run-folder.md`).
- `EvaluationFolder`: the output of `harbortrainer eval --out` (`evaluation/eval_folder.py`).
- `PrimeRLFolder`: a Prime-RL run, from the files of its file monitor (`runs/prime_rl_files.py`), with the fields that
  our plugin adds to a trace. An episode's first trace is the trial.
"""

import json
import os
import re
import tomllib
from contextlib import suppress
from dataclasses import replace
from datetime import datetime
from pathlib import Path

import psutil
from pydantic import BaseModel, ValidationError

from harbortrainer.config.redacted_config import redact
from harbortrainer.config.runfile import WARMUP
from harbortrainer.config.table import lookup
from harbortrainer.errors import UserError
from harbortrainer.evaluation.eval_folder import ABOUT, ROWS, TRANSCRIPTS
from harbortrainer.runs import prime_rl_files
from harbortrainer.runs.checkpoints import steps_in
from harbortrainer.runs.folder import flat
from harbortrainer.runs.locks import LOCK_FILE
from harbortrainer.runs.prime_rl_files import TrainedTrace
from harbortrainer.runs.provenance import run_config
from harbortrainer.runs.transcript import Place
from harbortrainer.runs.transcript_files import FOLDER, PENDING, transcript_place
from harbortrainer.runs.trial_row import TrialRow
from harbortrainer.trials.outcome import Outcome
from harbortrainer.view.folder_reader import FolderReader, JsonLine, WithoutAnnotations, check_folder
from harbortrainer.view.format import duration
from harbortrainer.view.queries import IndexedRun
from harbortrainer.view.run_config import FlatConfig, toml_config
from harbortrainer.view.token_decoder import TokenDecoder, tokenizer_file
from harbortrainer.view.transcript_detail import (
    NO_TRANSCRIPT,
    TRANSCRIPT_DELETED,
    add_saved_transcript,
    add_transcript,
)
from harbortrainer.view.trial_view import RunHead, TrialDetail


class ModelTable(BaseModel):
    """Shown keys of the `model` table of a run's config."""

    name: str = ""


class WarmupTable(BaseModel):
    """Shown keys of the `warmup` table of a run's config."""

    model: str | None = None


class ModelFile(BaseModel):
    """Shown keys of a run's config."""

    model: ModelTable = ModelTable()
    warmup: WarmupTable = WarmupTable()
    max_steps: object = None

    @property
    def title(self) -> str:
        """The model's name; of one that a warm-up made, what it was made from."""
        if self.model.name != WARMUP:
            return self.model.name
        return f"{self.warmup.model or 'tiny policy'} (warm-up)"


def is_running(folder: Path, lock: str = LOCK_FILE) -> bool:
    """Return whether the process named in the lock runs on this machine and started before it took the lock."""
    try:
        holder = json.loads((folder / lock).read_text(encoding="utf-8"))
        locked_at = datetime.fromisoformat(holder["started"]).timestamp()
        return holder["host"] == os.uname().nodename and psutil.Process(holder["pid"]).create_time() <= locked_at + 1
    except (OSError, ValueError, KeyError, TypeError, psutil.Error):
        return False


def json_file[T: BaseModel](path: Path, shape: type[T]) -> T:
    """Read a JSON file; return the defaults if it does not exist or is damaged."""
    try:
        return shape.model_validate_json(path.read_bytes())
    except (OSError, ValidationError):
        return shape()


def toml_file[T: BaseModel](path: Path, shape: type[T]) -> T:
    """Read a TOML file; return the defaults if it does not exist or is damaged."""
    try:
        return shape.model_validate(tomllib.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError):  # a ValidationError is a ValueError
        return shape()


STEP_FILE = re.compile(r"(eval_)?step_(\d+)\.jsonl")


class SummaryFile(BaseModel):
    """Shown fields of `summary.json`."""

    status: str = ""
    model: str = ""
    wall_s: float | None = None
    peak_rss_mb: float | None = None
    steps: int = 0
    failed_check: str | None = None


class EmbeddedFolder(WithoutAnnotations):
    """Reader of a run folder of the embedded engine."""

    required_fields = frozenset({"trial", "task", "outcome"})
    goes_on_after_torn_lines = False

    def trial_files(self, folder: Path) -> list[Path]:
        """Return the files with one line per trial."""
        found = [(match, path) for path in folder.glob("rollouts/*.jsonl") if (match := STEP_FILE.fullmatch(path.name))]
        ordered = [path for _, path in sorted(found, key=lambda one: (int(one[0][2]), bool(one[0][1])))]
        return [*ordered, folder / FOLDER / f"{PENDING}.jsonl"]

    def metric_files(self, folder: Path) -> list[Path]:
        """Return the files with one line per step."""
        return [folder / "metrics.jsonl"]

    def row(self, line: JsonLine, file: Path) -> TrialRow | None:
        """Return the row of a line; None for a trial that the run cancelled before it returned."""
        row = TrialRow.salvage(line)
        return row if row.trial or row.outcome != Outcome.cancelled else None

    def detail(self, folder: Path, row: TrialRow, line: JsonLine, file: Path) -> TrialDetail:
        """Return a trial with its turns."""
        detail = TrialDetail(row, error=row.error or "")
        place = transcript_place(file.stem, row.transcript) if row.transcript else None
        return add_saved_transcript(detail, folder, place, str(folder / "model"), model_of(folder))

    def head(self, folder: Path) -> RunHead:
        """Return the name, kind and status of the folder."""
        summary = json_file(folder / "summary.json", SummaryFile)
        if max(steps_in(folder / "checkpoints"), default=0) > summary.steps:
            summary = SummaryFile(model=summary.model)  # of an earlier start; a later one runs, or was killed
        status = "running" if is_running(folder) else summary.status or "incomplete"
        facts = [("engine", "embedded")]
        wall_s = None if status == "running" else summary.wall_s
        if wall_s is not None:
            facts.append(("wall time", duration(wall_s)))
        if summary.peak_rss_mb is not None:
            facts.append(("peak memory", f"{summary.peak_rss_mb / 1000:.1f} GB"))
        config = toml_file(folder / "config.toml", ModelFile)
        facts += [("max steps", str(config.max_steps))] if isinstance(config.max_steps, int) else []
        failed = (summary.steps + 1, summary.failed_check) if status == "stopped" and summary.failed_check else None
        return RunHead(folder.name, "run", str(folder), config.title or summary.model, status, facts, failed, wall_s)

    def config(self, folder: Path) -> FlatConfig:
        """Return the config of the run."""
        return toml_config(folder / "config.toml")


def model_of(folder: Path) -> str:
    """Return the model named in the run's config."""
    return toml_file(folder / "config.toml", ModelFile).model.name


class AboutFile(BaseModel):
    """Shown fields of `evaluation.json`."""

    policy: str = ""
    tasks: dict[str, str] = {}
    tasks_dir: str = ""
    attempts: int = 0
    rules: dict[str, object] = {}


class EvaluationFolder(WithoutAnnotations):
    """Reader of an evaluation folder. An attempt's number serves as its step, its task as its group."""

    required_fields = frozenset({"task", "attempt", "outcome"})
    goes_on_after_torn_lines = False

    def trial_files(self, folder: Path) -> list[Path]:
        """Return the files with one line per trial."""
        return [folder / ROWS]

    def metric_files(self, folder: Path) -> list[Path]:
        """Return no files: an evaluation has no metrics by step."""
        return []

    def row(self, line: JsonLine, file: Path) -> TrialRow | None:
        """Return the row of a line; None if the line has no trial."""
        row = TrialRow.salvage(line)
        attempt = row.attempt or 0
        shown = {
            "attempt": attempt,
            "step": attempt,
            "kind": "eval",
            "group": row.task_key[:12],
            "trial": row.trial or f"{row.task}__attempt-{attempt}",
        }
        return row.model_copy(update=shown) if row.task else None

    def detail(self, folder: Path, row: TrialRow, line: JsonLine, file: Path) -> TrialDetail:
        """Return a trial with its turns."""
        detail = TrialDetail(row, error=row.error or "")
        place = Place(TRANSCRIPTS, *row.transcript) if row.transcript else None
        return add_saved_transcript(detail, folder, place, base_of(folder))

    def head(self, folder: Path) -> RunHead:
        """Return the name, kind and status of the folder."""
        about = json_file(folder / ABOUT, AboutFile)
        finished = (folder / "report.json").is_file()
        status = "running" if is_running(folder) else "finished" if finished else "incomplete"
        facts = [("tasks", str(len(about.tasks))), ("attempts per task", str(about.attempts))]
        facts += [
            (name.replace("_", " "), str(about.rules[name]))
            for name in ("environment", "temperature")
            if about.rules.get(name) is not None
        ]
        return RunHead(folder.name, "evaluation", str(folder), about.policy, status, facts)

    def config(self, folder: Path) -> FlatConfig:
        """Return the rules of the evaluation."""
        about = json_file(folder / ABOUT, AboutFile)
        return flat(redact({"tasks_dir": about.tasks_dir, "attempts": about.attempts, "rules": about.rules}))


def base_of(folder: Path) -> str:
    """Return the evaluated model without its adapter."""
    return json_file(folder / ABOUT, AboutFile).policy.rpartition(" on ")[2]


LOCK = "configs/.lock"


class PrimeRLFolder:
    """Reader of a Prime-RL run folder."""

    required_fields = frozenset({"id", "traces"})
    goes_on_after_torn_lines = True

    def trial_files(self, folder: Path) -> list[Path]:
        """Return the files with one line per trial."""
        return prime_rl_files.episode_files(folder)

    def annotation_files(self, folder: Path) -> list[Path]:
        """Return the files with lines about trials of `trial_files`, written later than these."""
        return prime_rl_files.annotation_files(folder)

    def metric_files(self, folder: Path) -> list[Path]:
        """Return the files with one line per step."""
        return prime_rl_files.metric_files(folder)

    def row(self, line: JsonLine, file: Path) -> TrialRow | None:
        """Return the row of a line; None if the line has no trial."""
        row = prime_rl_files.row_of_line(line, file)
        return row if row is not None and row.trial else None

    def trace(self, line: JsonLine) -> str:
        """Return the id by which annotations name a trial."""
        return prime_rl_files.trace_of_line(line)

    def annotation(self, line: JsonLine) -> TrainedTrace | None:
        """Return the annotation in a line of `annotation_files`; None to ignore the line."""
        return prime_rl_files.trained_trace(line)

    def detail(self, folder: Path, row: TrialRow, line: JsonLine, file: Path) -> TrialDetail:
        """Return a trial with its turns."""
        detail, transcript = TrialDetail(row, error=row.error or ""), prime_rl_files.transcript_of_line(folder, line)
        if transcript is None:
            return replace(detail, transcript=TRANSCRIPT_DELETED if prime_rl_files.is_reduced(line) else NO_TRANSCRIPT)
        model, tokenizer = prime_rl_names(folder)
        return add_transcript(detail, transcript, TokenDecoder(tokenizer_file(tokenizer, model)))

    def head(self, folder: Path) -> RunHead:
        """Return the name, kind and status of the folder."""
        status = "running" if is_running(folder, LOCK) else "ended"
        model, _ = prime_rl_names(folder)
        return RunHead(folder.name, "prime-rl", str(folder), model, status, [("engine", "Prime-RL")])

    def config(self, folder: Path) -> FlatConfig:
        """Return the config of the run."""
        files = toml_config(*prime_rl_files.launch_files(folder))
        with suppress(UserError):
            return {**files, **flat(redact(run_config(folder)))}
        return files


def is_prime_rl(folder: Path) -> bool:
    """Return whether Prime-RL wrote this folder."""
    metrics = any(file.is_file() for file in prime_rl_files.metric_files(folder))
    return prime_rl_files.has_episodes(folder) or (metrics and (folder / "configs").is_dir())


def prime_rl_names(folder: Path) -> tuple[str, str]:
    """Return the names of the model and its tokenizer in the config of a Prime-RL run; "" for a missing one."""
    try:
        config = run_config(folder)
    except UserError:
        return "", ""
    model, tokenizer = (lookup(config, key) for key in ("trainer.model.name", "orchestrator.tokenizer.name"))
    return model if isinstance(model, str) else "", tokenizer if isinstance(tokenizer, str) else ""


def open_store(folder: Path) -> IndexedRun:
    """Open a run or evaluation folder and index it.

    Raises:
        UserError: The folder holds no run or evaluation, or one of its files cannot be read.
    """
    store = IndexedRun(folder, reader_for(folder))
    store.refresh()
    return store


def reader_for(folder: Path) -> FolderReader:
    """Return the reader for a folder. Raises `UserError` if the folder holds no run or evaluation."""
    check_folder(folder)
    if (reader := reader_of(folder)) is not None:
        return reader
    runs = sorted(path.parent.name for path in folder.glob("*/config.toml"))
    do = (
        f"pass one of its runs: {', '.join(runs[:5])}" if runs else "pass a run or evaluation folder, e.g. outputs/NAME"
    )
    raise UserError("contains no run or evaluation", where=str(folder), do=do)


def reader_of(folder: Path) -> FolderReader | None:
    """Return the reader for a folder; None if the folder holds no run or evaluation."""
    if (folder / "evaluation.json").is_file():
        return EvaluationFolder()
    if (folder / "config.toml").is_file() and (folder / "rollouts").is_dir():
        return EmbeddedFolder()
    return PrimeRLFolder() if is_prime_rl(folder) else None
