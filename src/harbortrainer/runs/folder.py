"""The run folder: everything that a run writes and `--resume` needs.

Contents of `outputs/<run>/`:

- `config.toml`: the resolved config
- `metrics.jsonl`: a line per step and per evaluation
- `rollouts/step_N.jsonl`: a line per trial; `eval_step_N.jsonl` for evaluations
- `transcripts/`: messages and tokens of each trial; `step_N.jsonl.gz` belongs to `rollouts/step_N.jsonl`
- `trials/`: Harbor's trial folders
- `checkpoints/step_N/`: adapter (peft), optimizer, `progress.json`
- `model/`: the policy made by the warm-up, if the config has one
- `log/`: logs of the engine and the environment servers
- `summary.json`, `reward.png`
- `made_of.json`: fingerprints of weights and tasks, package versions
- `.lock`: locked by the process of the run

Invariant: a folder belongs to one config, and to one process at a time. A run never writes into another run's folder.
"""

import shutil
import tomllib
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Self

from harbortrainer.errors import UserError
from harbortrainer.runs.disk_faults import folder_gone
from harbortrainer.runs.durable import write_whole
from harbortrainer.runs.locks import LOCK_FILE, RunLock, refuse_in_use
from harbortrainer.runs.metrics_log import MetricsLog

FOLDERS = ("rollouts", "trials", "checkpoints", "log")
MAY_CHANGE = (
    "max_steps",
    "ckpt",
    "monitors",
    "tensorboard",
    "prices",
    "output_dir",
    "log",
    "orchestrator.concurrency",
    "transcripts_mb",
)
"""Keys that may change between a start and its resume; every other key affects the result of the training."""


class RunFolder:
    """The paths of one run. Use `create`, which checks that the folder belongs to the run.

    Example:
        >>> run = RunFolder.create(Path("outputs"), "quickstart", config_text=text, resume=False)
        >>> run.metrics_file
        PosixPath('outputs/quickstart/metrics.jsonl')
    """

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()
        self.config_file = self.path / "config.toml"
        self.metrics_file = self.path / "metrics.jsonl"
        self.metrics = MetricsLog(self.metrics_file)
        self.summary_file = self.path / "summary.json"
        self.curve_file = self.path / "reward.png"
        self.rollouts = self.path / "rollouts"
        self.trials = self.path / "trials"
        self.checkpoints = self.path / "checkpoints"
        self.model = self.path / "model"
        self.log = self.path / "log"
        self.lock: RunLock | None = None
        """The lock on the folder, held from `create` to `release`."""

    @property
    def name(self) -> str:
        """Name of the run and its folder."""
        return self.path.name

    def rollouts_file(self, step: int) -> Path:
        """Return the file that lists the trials of step `step`."""
        return self.rollouts / f"step_{step}.jsonl"

    def eval_file(self, step: int) -> Path:
        """Return the file that lists the evaluation trials of policy version `step`."""
        return self.rollouts / f"eval_step_{step}.jsonl"

    @classmethod
    def create(cls, root: Path, name: str | None, *, config_text: str, resume: bool = False) -> Self:
        """Create the folder of a new run, or open the folder of a run to resume.

        Args:
            root: The folder of runs (`output_dir`).
            name: The run's name; None means the current time. A resume needs a name.
            config_text: The resolved config as TOML, saved as `config.toml`.
            resume: Continue the run of an existing folder.

        Raises:
            UserError: The folder exists without `resume`, or does not exist with it; it belongs to another config; or
                another process is using it.
        """
        run = cls.checked(root, name, config_text=config_text, resume=resume)
        run.path.mkdir(parents=True, exist_ok=True)
        run.lock = RunLock(run.path)
        for folder in FOLDERS:
            (run.path / folder).mkdir(parents=True, exist_ok=True)
        write_whole(run.config_file, config_text)  # a resume may change a few keys, such as max_steps
        return run

    @classmethod
    def checked(cls, root: Path, name: str | None, *, config_text: str, resume: bool = False) -> Self:
        """Return the folder that `create` would open, without writing anything. Raises as `create`."""
        if resume and not name:
            raise UserError(
                "--resume needs the name of the run",
                where="run.name",
                do='set [run] name = "..." or --run.name',
            )
        run = cls(root / (name or datetime.now(UTC).strftime("%Y%m%d-%H%M%S")))
        refuse_in_use(run.path)
        if resume:
            run._check_same(config_text)
        else:
            run._check_new()
        return run

    def release(self) -> None:
        """Release the lock on the folder."""
        if self.lock is not None:
            self.lock.release()
            self.lock = None

    def check_present(self) -> None:
        """Raise `RunStoppedError` if the folder was removed, moved or replaced."""
        if self.lock is not None and not self.lock.is_held:
            raise folder_gone(self.path)

    def discard_if_empty(self) -> None:
        """Remove the folder if the run has written no result, so that it can be started again."""
        if not self.model.exists() and not self.metrics_file.exists() and not any(self.checkpoints.glob("*")):
            shutil.rmtree(self.path)

    def _check_new(self) -> None:
        if self.path.is_file():
            raise UserError("is a file, not a run folder", where=str(self.path), do="choose another run.name")
        if self.path.exists() and any(path.name != LOCK_FILE for path in self.path.iterdir()):
            raise UserError(
                "this run folder is not empty",
                where=str(self.path),
                do="add --resume to continue that run, or choose another run.name",
            )

    def _check_same(self, config_text: str) -> None:
        if not self.config_file.is_file():
            raise UserError(
                "there is no run to resume here", where=str(self.config_file), do="start it without --resume"
            )
        try:
            difference = first_difference(self.config_file.read_text(encoding="utf-8"), config_text)
        except ValueError as error:
            raise UserError("cannot be read", where=str(self.config_file), do="restore the file") from error
        if difference is not None:
            raise UserError(
                f"this folder belongs to another run: {difference}",
                where=str(self.config_file),
                do="resume with the config that the run was started with, or choose another run.name",
            )


def flat(tree: Mapping[str, object], prefix: str = "") -> dict[str, object]:
    """Flatten a nested table to dotted keys; lists of tables use indices."""
    out: dict[str, object] = {}
    for key, value in tree.items():
        path = f"{prefix}{key}"
        if isinstance(value, list) and value and all(isinstance(item, dict) for item in value):
            value = {str(index): item for index, item in enumerate(value)}
        if isinstance(value, Mapping):
            out |= flat(value, f"{path}.")
        else:
            out[path] = value
    return out


def is_identity_key(key: str) -> bool:
    """Whether a key must stay the same at a resume."""
    return not any(key == name or key.startswith(f"{name}.") for name in MAY_CHANGE)


def first_difference(was: str, now: str) -> str | None:
    """Describe the first key in which two resolved configs (TOML) are different runs; None if they are the same run."""
    old, new = (
        {key: value for key, value in flat(tomllib.loads(text)).items() if is_identity_key(key)} for text in (was, now)
    )
    return first_difference_of(old, new)


def first_difference_of(was: Mapping[str, object], now: Mapping[str, object]) -> str | None:
    """Describe the first dotted key in which two nested tables differ; None if they are equal."""
    old, new = flat(was), flat(now)
    for key in sorted(old.keys() | new.keys()):
        if old.get(key) != new.get(key):
            return f"{key} was {old.get(key, 'not set')!r} and is {new.get(key, 'not set')!r}"
    return None
