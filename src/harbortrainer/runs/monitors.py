"""The monitors of a run: Weights & Biases and TensorBoard. Their packages are imported when a monitor opens.

Metrics have the same names as in `metrics.jsonl` (docs/metrics.md). The run at W&B is set up as in Prime-RL
(src/prime_rl/monitors/wandb/monitor.py, 559b44772): `step` is the axis of every metric.
"""

import importlib
import os
import uuid
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

from harbortrainer.config.run_sections import PROJECT, WandbKeys
from harbortrainer.config.runfile import RunConfig
from harbortrainer.config.table import TomlTable
from harbortrainer.errors import UserError
from harbortrainer.runs.metrics_log import MetricsMonitor

INIT_S = 30
"""Seconds to wait for W&B before the run continues without it."""


class WandbMonitor:
    """A run at Weights & Biases, or on disk for `wandb sync`.

    Args:
        keys: `[monitors.wandb]`.
        run: The run folder; W&B puts its files below it.
        config: The config to show at W&B.
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
        """Create the run at W&B, or continue it."""
        # Otherwise W&B prints an advertisement for Weave.
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
        """Queue a line; W&B's process sends it."""
        if self._wandb is not None:
            self._wandb.log({**figures, "step": step})

    def close(self) -> None:
        """Wait until all lines are sent."""
        if self._wandb is not None:
            self._wandb.finish(exit_code=0)


class TensorboardMonitor:
    """TensorBoard event files in `tensorboard/` of the run folder."""

    name = "TensorBoard"

    def __init__(self, run: Path) -> None:
        self.folder = run / "tensorboard"

    def open(self, known_as: str | None) -> str:
        """Create a new event file; TensorBoard merges the event files of a folder."""
        self._writer = imported("tensorboardX").SummaryWriter(logdir=str(self.folder))
        return self.folder.name

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        """Write the metrics of one line."""
        for key, value in figures.items():
            self._writer.add_scalar(key, value, global_step=step)
        self._writer.flush()

    def close(self) -> None:
        """Close the event file."""
        self._writer.close()


def imported(package: str) -> ModuleType:
    """Import the optional package of a monitor."""
    return importlib.import_module(package)


def monitors_of(config: RunConfig, run: Path, *, shown: TomlTable) -> list[MetricsMonitor]:
    """Return the monitors of a run file; `shown` is the config without secrets."""
    found: list[MetricsMonitor] = []
    if config.monitors.wandb is not None:
        found.append(WandbMonitor(config.monitors.wandb, run, shown))
    if config.tensorboard:
        found.append(TensorboardMonitor(run))
    return found


def require_monitors(config: RunConfig) -> None:
    """Raise `UserError` if the package of a configured monitor is not installed; nothing is imported."""
    required = {"wandb": "[monitors.wandb]"} if config.monitors.wandb is not None else {}
    required |= {"tensorboardX": "tensorboard"} if config.tensorboard else {}
    for package, key in required.items():
        if find_spec(package) is None:
            do = "remove that key, or run `uv sync --extra local --extra monitors`"
            raise UserError(f"{package} is not installed", where=key, do=do)
