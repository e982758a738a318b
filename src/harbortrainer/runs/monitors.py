"""The monitors that a run file can ask for: Weights & Biases, TensorBoard. Their packages are imported when they open.

Names are those of `metrics.jsonl` (docs/metrics.md), which are Prime-RL's where the meaning is the same; the run at W&B
is set up as Prime-RL does it (src/prime_rl/monitors/wandb/monitor.py, 559b44772): `step` is every figure's axis.
"""

import importlib
import os
import uuid
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

from harbortrainer.config.monitors_table import PROJECT, WandbKeys
from harbortrainer.config.runfile import RunConfig
from harbortrainer.config.table import TomlTable
from harbortrainer.errors import UserError
from harbortrainer.runs.metrics_log import MetricsMonitor

INIT_S = 30
"""Seconds that W&B may take to answer before the run goes on without it."""


class WandbMonitor:
    """A run at Weights & Biases, or on disk for `wandb sync`.

    Args:
        keys: `[monitors.wandb]`.
        run: The run's folder; W&B's own files go below it.
        config: What is shown as the run's config.
    """

    name = "W&B"

    def __init__(self, keys: WandbKeys, run: Path, config: TomlTable) -> None:
        self.keys, self.run, self.config = keys, run, config
        self._wandb: ModuleType | None = None

    @property
    def mode(self) -> str:
        """`online`, `offline` or `disabled`."""
        return os.environ.get("WANDB_MODE") or ("offline" if self.keys.offline else "online")

    def open(self, known_as: str | None) -> str:
        """Make the run there, or go on with it."""
        # Without it W&B proposes another product of its own in the middle of the run's lines.
        os.environ.setdefault("WANDB_DISABLE_WEAVE", "true")
        wandb = self._wandb = imported("wandb")
        own = known_as or uuid.uuid4().hex[:8]
        settings = wandb.Settings(mode=self.mode, init_timeout=INIT_S, console="off", silent=True)
        resume = "allow" if self.mode == "online" else None
        name, project = self.keys.name or self.run.name, self.keys.project or PROJECT
        about = {"project": project, "entity": self.keys.entity, "group": self.keys.group, "tags": self.keys.tags}
        wandb.init(id=own, resume=resume, name=name, dir=self.run, config=self.config, settings=settings, **about)
        wandb.define_metric("*", step_metric="step")
        return own

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        """Hand a line over; W&B's own process sends it."""
        if self._wandb is not None:
            self._wandb.log({**figures, "step": step})

    def close(self) -> None:
        """Wait until all is sent."""
        if self._wandb is not None:
            self._wandb.finish(exit_code=0)


class TensorboardMonitor:
    """Event files for TensorBoard, in `tensorboard/` of the run's folder."""

    name = "TensorBoard"

    def __init__(self, run: Path) -> None:
        self.folder = run / "tensorboard"

    def open(self, known_as: str | None) -> str:
        """Begin another file of events; TensorBoard shows those of one folder as one."""
        self._writer = imported("tensorboardX").SummaryWriter(logdir=str(self.folder))
        return self.folder.name

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        """Write a line down."""
        for key, value in figures.items():
            self._writer.add_scalar(key, value, global_step=step)
        self._writer.flush()

    def close(self) -> None:
        """Close the file."""
        self._writer.close()


def imported(package: str) -> ModuleType:
    """A package that is there only where a monitor is asked for."""
    return importlib.import_module(package)


def monitors_of(config: RunConfig, run: Path, *, shown: TomlTable) -> list[MetricsMonitor]:
    """The monitors that a run file asks for; `shown`: the config as others may see it."""
    found: list[MetricsMonitor] = []
    if config.monitors.wandb is not None:
        found.append(WandbMonitor(config.monitors.wandb, run, shown))
    if config.tensorboard:
        found.append(TensorboardMonitor(run))
    return found


def need_monitors(config: RunConfig) -> None:
    """Raises `UserError` when the package of a monitor that is asked for is not installed; nothing is imported."""
    asked = {"wandb": "[monitors.wandb]"} if config.monitors.wandb is not None else {}
    asked |= {"tensorboardX": "tensorboard"} if config.tensorboard else {}
    for package, key in asked.items():
        if find_spec(package) is None:
            do = "take that out of the file, or run `uv sync --extra local --extra monitors`"
            raise UserError(f"{package} is not installed", where=key, do=do)
