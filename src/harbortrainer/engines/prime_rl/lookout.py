"""What can be seen of a running Prime-RL from outside: its processes, and what its orchestrator writes.

Contract: `sight` reads `/proc` and two kinds of files and changes nothing; what cannot be read counts as not there.
A process belongs to the run by `HARBORTRAINER_RUN` in its environment, and to an env server by the log that its output
goes to (`logs/attempt_N/envs/<split>/<name>.log`): Prime-RL's processes give themselves other command lines.
"""

import os
import re
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import psutil

from harbortrainer.engines.prime_rl.cleanup import processes_of
from harbortrainer.engines.prime_rl.failure_report import COLOUR, find_log, last_lines
from harbortrainer.engines.prime_rl.standstill import Sight, Standstill, StandstillWatch

ORCHESTRATOR_LOG = "orchestrator.log"
IN_FLIGHT = re.compile(r"Train batch .*?(?P<count>\d+) inflight episodes \([^)]*\)")
"""The pipeline's line, which the orchestrator writes every `log.interval` seconds."""

TAIL_BYTES = 65536
WORKER = "spawn_main"
"""In the command line of a process that multiprocessing spawned, unless it is its resource tracker."""


class Lookout:
    """Looks at one run.

    Args:
        run: The run's identity.
        run_dir: Its folder.
        longest_s: The longest that an episode may take, None where nothing bounds it.
    """

    def __init__(self, run: str, run_dir: Path, longest_s: float | None) -> None:
        self.run, self.run_dir = run, run_dir.resolve()
        self.watch = StandstillWatch(longest_s)

    def look(self) -> Standstill | None:
        """Whether the run stands still, with what speaks for it."""
        found = self.watch.look(self.sight())
        if found is None:
            return None
        ended = how_it_ended(found.pid) if found.pid is not None else ""
        log = find_log(self.run_dir, found.name.lower())
        return replace(
            found,
            what=found.what + (f"; it was {ended}" if ended else ""),
            log=str(log or ""),
            last_lines=tuple(last_lines(log)) if log else (),
        )

    def sight(self) -> Sight:
        """What is there now."""
        by_log: dict[Path, list[psutil.Process]] = {}
        for process in processes_of(self.run):
            if (log := self._log_of(process)) is not None:
                by_log.setdefault(log, []).append(process)
        workers = {name: _workers(group) for log, group in by_log.items() if (name := server_name(log))}
        orchestrator = next((log for log in by_log if log.name == ORCHESTRATOR_LOG), None)
        line = "" if orchestrator is None else _last_line(self.run_dir / "logs" / orchestrator)
        said = IN_FLIGHT.search(line)
        return Sight(
            at=time.monotonic(),
            orchestrator=orchestrator is not None,
            workers=workers,
            in_flight=int(said["count"]) if said else 0,
            returned=(said[0] if said else "", self._bytes_returned()),
        )

    def _log_of(self, process: psutil.Process) -> Path | None:
        """The log that a process writes to, relative to the folder of logs."""
        with suppress(OSError):
            path = Path(f"/proc/{process.pid}/fd/1").readlink()
            if path.is_relative_to(self.run_dir / "logs"):
                return path.relative_to(self.run_dir / "logs")
        return None

    def _bytes_returned(self) -> int:
        """Size of the files that every episode is added to the moment it comes back."""
        total = 0
        for path in self.run_dir.glob("rollouts/step_*/*/all/traces.jsonl"):
            with suppress(OSError):
                total += path.stat().st_size
        return total


def server_name(log: Path) -> str:
    """The env server that writes this log, as `rl` names it; "" for another process's.

    Example:
        >>> server_name(Path("attempt_1/envs/train/harbor.log"))
        'train env server harbor'
    """
    parts = log.parts
    return f"{parts[2]} env server {log.stem}" if len(parts) == 4 and parts[1] == "envs" else ""


def how_it_ended(pid: int) -> str:
    """How a process ended that its parent has not buried: "killed by signal 9", or "" where nobody can tell."""
    with suppress(OSError, ValueError):
        status = int(Path(f"/proc/{pid}/stat").read_text().rsplit(maxsplit=1)[-1])
        if number := status & 0x7F:
            return f"killed by signal {number}"
        return f"ended with exit code {status >> 8}" if status else ""
    return ""


def _workers(group: list[psutil.Process]) -> frozenset[int]:
    """The workers among the processes that write to one env server's log."""
    return frozenset(process.pid for process in group if _is_worker(process))


def _is_worker(process: psutil.Process) -> bool:
    with suppress(psutil.Error):
        return any(WORKER in word for word in process.cmdline())
    return False


def _last_line(log: Path) -> str:
    """The orchestrator's last line about its pipeline."""
    with suppress(OSError), log.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES))
        lines = COLOUR.sub("", file.read().decode(errors="replace")).splitlines()
        return next((line for line in reversed(lines) if IN_FLIGHT.search(line)), "")
    return ""
