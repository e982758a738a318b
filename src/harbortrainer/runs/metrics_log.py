"""The figures of a run: a line of `metrics.jsonl` each, and the same to every monitor.

Invariants: the file comes first, and is the truth; a monitor gets each line once, in order, also over a kill and a
resume, and a line only once its step is finished (`publish`); a monitor that fails is told of once, is left out until
the run is started again, and never ends the run. What it was not told then, it is told at the next start.
"""

import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from pydantic import BaseModel, RootModel

from harbortrainer.runs.durable import append_line, read_lines, write_whole

STATE = "monitors.json"


class MetricsMonitor(Protocol):
    """Somebody who is shown the figures of a run."""

    name: str

    def open(self, known_as: str | None) -> str:
        """Begin, or go on with what was begun; returns what it is to be known by at a resume."""
        ...

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        """Take one line."""
        ...

    def close(self) -> None:
        """Send what is left."""
        ...


class Acquaintance(BaseModel):
    """What is kept about a monitor between two starts of a run."""

    known_as: str
    """What it calls the run."""
    lines: int
    """How many lines it was told."""


class Acquaintances(RootModel[dict[str, Acquaintance]]):
    """By the monitor's name."""


class MetricsLog:
    """The lines of one run.

    Args:
        file: `metrics.jsonl`.
    """

    def __init__(self, file: Path) -> None:
        self.file, self._state = file, file.with_name(STATE)
        self._open: dict[str, MetricsMonitor] = {}
        self._told: dict[str, int] = {}
        """How many lines each monitor was told, for those of earlier starts too."""
        self._known: dict[str, str] = {}
        self._tell: Callable[[str], object] = lambda line: None
        self._rows: list[Mapping[str, object]] = []

    def start(self, monitors: Sequence[MetricsMonitor], tell: Callable[[str], object]) -> None:
        """Open the monitors, and tell each what it has missed; `tell` takes lines for the user."""
        self._tell = tell
        self._rows = list(read_lines(self.file))
        for name, state in self._remembered().items():
            self._told[name], self._known[name] = state.lines, state.known_as
        for monitor in monitors:
            with _Watched(self, monitor):
                self._known[monitor.name] = monitor.open(self._known.get(monitor.name))
                self._told[monitor.name] = min(self._told.get(monitor.name, 0), len(self._rows))
                self._open[monitor.name] = monitor
        self.publish()

    def write(self, row: Mapping[str, object]) -> None:
        """Append a line to the file. Raises `OSError`."""
        append_line(self.file, row)
        self._rows.append(row)

    def publish(self) -> None:
        """Show the monitors every line that they have not seen."""
        for name, monitor in list(self._open.items()):
            with _Watched(self, monitor):
                for row in self._rows[self._told[name] :]:
                    monitor.log(step_of(row), figures_of(row))
                    self._told[name] += 1
        if self._known:
            told = {name: Acquaintance(known_as=own, lines=self._told[name]) for name, own in self._known.items()}
            write_whole(self._state, Acquaintances(told).model_dump_json(indent=1) + "\n")

    def close(self, within: float) -> None:
        """Let the monitors send what is left, for at most so many seconds."""
        for name, monitor in list(self._open.items()):
            thread = threading.Thread(target=self._close, args=(monitor,), daemon=True)
            thread.start()
            thread.join(within)
            if thread.is_alive():
                self._tell(f"warning: {name} is still sending; what it has not sent lies in {self.file.parent}")
            self._open.pop(name, None)

    def _close(self, monitor: MetricsMonitor) -> None:
        with _Watched(self, monitor):
            monitor.close()

    def _remembered(self) -> dict[str, Acquaintance]:
        try:
            return Acquaintances.model_validate_json(self._state.read_bytes()).root
        except (OSError, ValueError):
            return {}

    def leave_out(self, monitor: MetricsMonitor, error: BaseException) -> None:
        """Go on without a monitor, and say so."""
        self._open.pop(monitor.name, None)
        why = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        self._tell(f"warning: {monitor.name} failed and is left out from here on ({why}); {self.file} has every figure")


class _Watched:
    """A block in which a monitor may fail in whatever way it likes."""

    def __init__(self, log: MetricsLog, monitor: MetricsMonitor) -> None:
        self.log, self.monitor = log, monitor

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        if not isinstance(error, Exception):
            return False
        self.log.leave_out(self.monitor, error)
        return True


def step_of(row: Mapping[str, object]) -> int:
    """The step that a line is about."""
    step = row.get("step")
    return step if isinstance(step, int) else 0


def figures_of(row: Mapping[str, object]) -> dict[str, float]:
    """The numbers of a line, but its step; what is none is not there."""
    return {key: float(value) for key, value in row.items() if key != "step" and isinstance(value, int | float)}
