"""The run folder: one folder holds everything a run wrote, and is all that `--resume` needs.

    outputs/<run>/
      config.toml            the resolved config
      metrics.jsonl          a line a step (and a line an evaluation)
      rollouts/step_N.jsonl  a line a trial; eval_step_N.jsonl for evaluations
      transcripts/           what was said and sampled in each trial: step_N.jsonl.gz beside rollouts/step_N.jsonl
      trials/                Harbor's own folders
      checkpoints/step_N/    adapter (peft), optimizer, progress.json
      model/                 the policy that the warm-up made, when the config has one
      log/                   the engine's and the environment servers' logs
      summary.json, reward.png
      made_of.json           fingerprints of weights and tasks, releases of packages
      .lock                  held by the process that is at work here

Invariant: a folder belongs to one config, and to one process at a time. A run starts in a folder of its own or goes on
in its own; it never writes into another run's.
"""

import shutil
import tomllib
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Self

from harbortrainer.errors import UserError
from harbortrainer.runs.disk_faults import gone
from harbortrainer.runs.durable import write_whole
from harbortrainer.runs.metrics_log import MetricsLog
from harbortrainer.runs.run_lock import LOCK_FILE, RunLock, refuse_in_use

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
"""A longer run, how often it is saved, what watches it, what it costs, how much is kept to look at: what may change
between a start and its resume. Everything else decides what is learned from what."""


class RunFolder:
    """The paths of one run. Use `create`, which checks whose folder it is.

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
        """Held from `create` to `release`."""

    @property
    def name(self) -> str:
        """The run's name, which is its folder's."""
        return self.path.name

    def rollouts_file(self, step: int) -> Path:
        """Where the trials that step `step` trained on are listed."""
        return self.rollouts / f"step_{step}.jsonl"

    def eval_file(self, step: int) -> Path:
        """Where the trials of the evaluation of policy version `step` are listed."""
        return self.rollouts / f"eval_step_{step}.jsonl"

    @classmethod
    def create(cls, root: Path, name: str | None, *, config_text: str, resume: bool = False) -> Self:
        """Make the folder of a new run, or open the one to go on in.

        Args:
            root: The folder of runs (`output_dir`).
            name: The run's name; None takes the time of day. A resume needs a name.
            config_text: The resolved config as TOML, kept as `config.toml`.
            resume: Go on in a folder that is there.

        Raises:
            UserError: The folder is there and `resume` is not set, it is not there and `resume` is, it was made by
                another config, or another process is at work in it.
        """
        run = cls.checked(root, name, config_text=config_text, resume=resume)
        run.path.mkdir(parents=True, exist_ok=True)
        run.lock = RunLock(run.path)
        for folder in FOLDERS:
            (run.path / folder).mkdir(parents=True, exist_ok=True)
        if not run.config_file.exists():
            write_whole(run.config_file, config_text)
        return run

    @classmethod
    def checked(cls, root: Path, name: str | None, *, config_text: str, resume: bool = False) -> Self:
        """The folder that `create` would make or open, with nothing written. Raises as `create`."""
        if resume and not name:
            raise UserError(
                "a resume needs to know which run",
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
        """Let another process have the folder."""
        if self.lock is not None:
            self.lock.release()
            self.lock = None

    def need(self) -> None:
        """Raise `RunStoppedError` when the folder is no longer the one that was opened."""
        if self.lock is not None and not self.lock.holds:
            raise gone(self.path)

    def discard_if_empty(self) -> None:
        """Remove the folder of a run that never got to do anything, so that the next start finds none."""
        if not self.model.exists() and not self.metrics_file.exists() and not any(self.checkpoints.glob("*")):
            shutil.rmtree(self.path)

    def _check_new(self) -> None:
        if self.path.is_file():
            raise UserError("is a file, not a run folder", where=str(self.path), do="choose another run.name")
        if self.path.exists() and any(path.name != LOCK_FILE for path in self.path.iterdir()):
            raise UserError(
                "this run folder is not empty",
                where=str(self.path),
                do="add --resume to go on with that run, or choose another run.name",
            )

    def _check_same(self, config_text: str) -> None:
        if not self.config_file.is_file():
            raise UserError(
                "there is no run to resume here", where=str(self.config_file), do="start it without --resume"
            )
        try:
            difference = first_difference(self.config_file.read_text(encoding="utf-8"), config_text)
        except ValueError as error:
            raise UserError("cannot be read", where=str(self.config_file), do="put it back as it was") from error
        if difference is not None:
            raise UserError(
                f"this folder belongs to another run: {difference}",
                where=str(self.config_file),
                do="resume with the config the run was started with, or choose another run.name",
            )


def flat(tree: Mapping[str, object], prefix: str = "") -> dict[str, object]:
    """A nested table as dotted keys; lists of tables by index."""
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


def decides(key: str) -> bool:
    """Whether a key takes part in a run's identity."""
    return not any(key == name or key.startswith(f"{name}.") for name in MAY_CHANGE)


def first_difference(was: str, now: str) -> str | None:
    """The first key that makes two resolved configs (TOML) different runs, in words; None when they are one."""
    old, new = ({key: value for key, value in flat(tomllib.loads(text)).items() if decides(key)} for text in (was, now))
    return first_difference_of(old, new)


def first_difference_of(was: Mapping[str, object], now: Mapping[str, object]) -> str | None:
    """The first dotted key in which two nested tables differ, in words; None when they are equal."""
    old, new = flat(was), flat(now)
    for key in sorted(old.keys() | new.keys()):
        if old.get(key) != new.get(key):
            return f"{key} was {old.get(key, 'not set')!r} and is {new.get(key, 'not set')!r}"
    return None
