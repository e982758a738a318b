"""The metrics of a run: lines of `metrics.jsonl`, which are also sent to monitors.

Invariants: a line is written to the file before it is sent. A monitor gets the lines in order, also across a resume,
and only after their step is finished (`publish`). A line that was sent just before a kill is sent again. A failing
monitor causes one warning and is dropped until the next start, which sends the missed lines. It never ends the run.
"""

import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Protocol

from pydantic import BaseModel, RootModel

from harbortrainer.errors import first_line
from harbortrainer.runs.durable import append_line, read_lines, write_whole

STATE = "monitors.json"


class MetricsMonitor(Protocol):
    """A receiver of a run's metrics."""

    name: str

    def open(self, known_as: str | None) -> str:
        """Start a run at the monitor, or continue the run `known_as`; return the id for the next resume."""
        ...

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        """Receive the metrics of one line."""
        ...

    def close(self) -> None:
        """Send all remaining lines."""
        ...


class MonitorState(BaseModel):
    """Saved state of a monitor between two starts of a run."""

    known_as: str
    """The monitor's id of the run."""
    lines: int
    """Number of lines sent."""


class MonitorStates(RootModel[dict[str, MonitorState]]):
    """States of the monitors, by name."""


class MetricsLog:
    """The metrics lines of one run.

    Args:
        file: `metrics.jsonl`.
    """

    def __init__(self, file: Path) -> None:
        self.file, self._state = file, file.with_name(STATE)
        self._open: dict[str, MetricsMonitor] = {}
        self._sent: dict[str, int] = {}
        """Number of lines sent to each monitor, including monitors of earlier starts."""
        self._known: dict[str, str] = {}
        self._report: Callable[[str], object] = lambda line: None
        self._lines = 0
        """Number of lines in the file."""
        self._unsent: deque[Mapping[str, object]] = deque()
        """The last lines, of which an open monitor lacks some."""

    def start(self, monitors: Sequence[MetricsMonitor], report: Callable[[str], object]) -> None:
        """Open the monitors and send the lines that they have missed; `report` prints warnings."""
        self._report = report
        self._unsent = deque(read_lines(self.file))
        self._lines = len(self._unsent)
        for name, state in self._read_state().items():
            self._sent[name], self._known[name] = state.lines, state.known_as
        for monitor in monitors:
            with _MonitorGuard(self, monitor):
                self._known[monitor.name] = monitor.open(self._known.get(monitor.name))
                self._sent[monitor.name] = min(self._sent.get(monitor.name, 0), self._lines)
                self._open[monitor.name] = monitor
        self.publish()

    def write(self, row: Mapping[str, object]) -> None:
        """Append a line to the file. Raises `OSError`."""
        append_line(self.file, row)
        self._unsent.append(row)
        self._lines += 1

    def publish(self) -> None:
        """Send each monitor the lines that it has not received."""
        for name, monitor in list(self._open.items()):
            with _MonitorGuard(self, monitor):
                first = self._lines - len(self._unsent)
                for row in islice(self._unsent, self._sent[name] - first, None):
                    monitor.log(step_of(row), figures_of(row))
                    self._sent[name] += 1
        sent = min((self._sent[name] for name in self._open), default=self._lines)
        while len(self._unsent) > self._lines - sent:
            self._unsent.popleft()
        if self._known:
            states = {name: MonitorState(known_as=own, lines=self._sent[name]) for name, own in self._known.items()}
            write_whole(self._state, MonitorStates(states).model_dump_json(indent=1) + "\n")

    def close(self, within: float) -> None:
        """Close the monitors; each may send remaining lines for `within` seconds."""
        for name, monitor in list(self._open.items()):
            thread = threading.Thread(target=self._close, args=(monitor,), daemon=True)
            thread.start()
            thread.join(within)
            if thread.is_alive():
                self._report(f"warning: {name} is still sending; unsent data is in {self.file.parent}")
            self._open.pop(name, None)

    def _close(self, monitor: MetricsMonitor) -> None:
        with _MonitorGuard(self, monitor):
            monitor.close()

    def _read_state(self) -> dict[str, MonitorState]:
        try:
            return MonitorStates.model_validate_json(self._state.read_bytes()).root
        except (OSError, ValueError):
            return {}

    def drop_monitor(self, monitor: MetricsMonitor, error: BaseException) -> None:
        """Drop a failed monitor and print a warning."""
        self._open.pop(monitor.name, None)
        why = first_line(error)
        self._report(f"warning: {monitor.name} failed and is disabled ({why}); {self.file} has all metrics")


class _MonitorGuard:
    """Context in which an exception drops the monitor instead of ending the run."""

    def __init__(self, log: MetricsLog, monitor: MetricsMonitor) -> None:
        self.log, self.monitor = log, monitor

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        if not isinstance(error, Exception):
            return False
        self.log.drop_monitor(self.monitor, error)
        return True


def step_of(row: Mapping[str, object]) -> int:
    """Return the step of a line."""
    step = row.get("step")
    return step if isinstance(step, int) else 0


def figures_of(row: Mapping[str, object]) -> dict[str, float]:
    """Return the numeric values of a line, without its step and nulls."""
    return {key: float(value) for key, value in row.items() if key != "step" and isinstance(value, int | float)}
