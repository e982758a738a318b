"""The run folder: one folder holds everything a run wrote, and is all that `--resume` needs.

    outputs/<run>/
      config.toml            the resolved config
      metrics.jsonl          a line a step (and a line an evaluation)
      rollouts/step_N.jsonl  a line a trial; eval_step_N.jsonl for evaluations
      trials/                Harbor's own folders
      checkpoints/step_N/    adapter (peft), optimizer, progress.json
      model/                 the policy that the warm-up made, when the config has one
      log/                   the engine's and the environment servers' logs
      summary.json, reward.png

Invariant: a folder belongs to one config. A run starts in a folder of its own or goes on in its own; it never
writes into another run's.
"""

import shutil
from datetime import UTC, datetime
from pathlib import Path
from typing import Self

from harbortrainer.errors import UserError
from harbortrainer.runs.durable import write_whole
from harbortrainer.runs.identity import first_difference

FOLDERS = ("rollouts", "trials", "checkpoints", "log")


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
        self.summary_file = self.path / "summary.json"
        self.curve_file = self.path / "reward.png"
        self.rollouts = self.path / "rollouts"
        self.trials = self.path / "trials"
        self.checkpoints = self.path / "checkpoints"
        self.model = self.path / "model"
        self.log = self.path / "log"

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
            UserError: The folder is there and `resume` is not set, it is not there and `resume` is, or it was
                made by another config.
        """
        if resume and not name:
            raise UserError(
                "a resume needs to know which run",
                where="run.name",
                do='set [run] name = "..." or --run.name',
            )
        run = cls(root / (name or datetime.now(UTC).strftime("%Y%m%d-%H%M%S")))
        if resume:
            run._check_same(config_text)
        else:
            run._check_new()
        for folder in FOLDERS:
            (run.path / folder).mkdir(parents=True, exist_ok=True)
        if not run.config_file.exists():
            write_whole(run.config_file, config_text)
        return run

    def discard_if_empty(self) -> None:
        """Remove the folder of a run that never got to do anything, so that the next start finds none."""
        if not self.model.exists() and not self.metrics_file.exists() and not any(self.checkpoints.iterdir()):
            shutil.rmtree(self.path)

    def _check_new(self) -> None:
        if self.path.is_file():
            raise UserError("is a file, not a run folder", where=str(self.path), do="choose another run.name")
        if self.path.exists() and any(self.path.iterdir()):
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
        difference = first_difference(self.config_file.read_text(encoding="utf-8"), config_text)
        if difference is not None:
            raise UserError(
                f"this folder belongs to another run: {difference}",
                where=str(self.config_file),
                do="resume with the config the run was started with, or choose another run.name",
            )
