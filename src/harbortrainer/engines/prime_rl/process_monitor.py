"""Monitor of a running Prime-RL from outside: its processes, and its orchestrator's output.

Contract: `snapshot` reads `/proc` and two kinds of files and changes nothing; what cannot be read counts as missing.
Processes of the run have `HARBORTRAINER_RUN` in their environment. Those of an env server write to its log
(`logs/attempt_N/envs/<split>/<name>.log`); their command lines are no help, because Prime-RL changes them. A worker is
a child of the server: the processes that it forks for its sandboxes have its command line until they exec.
"""

import re
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import psutil

from harbortrainer.engines.cleanup import processes_of
from harbortrainer.engines.prime_rl.failure_report import find_log
from harbortrainer.engines.prime_rl.stall_detector import Snapshot, Stall, StallDetector
from harbortrainer.runs.log_files import last_lines
from harbortrainer.runs.prime_rl_files import growing_files
from harbortrainer.trials.start_watch import forget_starts, given_up

ORCHESTRATOR_LOG = "orchestrator.log"
IN_FLIGHT = re.compile(r"(Train batch .*?)?(?P<count>\d+) inflight episodes \(train=[^)]*\)")
"""The orchestrator's status line, written every `log.interval` seconds. Newer releases may not name the batch first."""

SPAWNED = "spawn_main"
"""In the command line of a process that multiprocessing spawned, and of what it forks; not of the resource tracker."""


class ProcessMonitor:
    """Takes snapshots of one run and detects stalls.

    Args:
        run: The run's identity.
        run_dir: Its folder.
        episode_limit_s: Maximum seconds of an episode, None if there is no limit.
        starts: Folders with the states of starts at providers.
    """

    def __init__(self, run: str, run_dir: Path, episode_limit_s: float | None, starts: Sequence[Path] = ()) -> None:
        self.run, self.run_dir = run, run_dir.resolve()
        self.detector = StallDetector(episode_limit_s)
        self.starts = starts
        forget_starts(starts)

    def check(self) -> Stall | None:
        """Return the stall of the run with its evidence, None if it makes progress. A provider given up is a stall."""
        if (provider := given_up(self.starts)) is not None:
            return Stall(provider.what, "", provider.do, restart_helps=not provider.denied)
        found = self.detector.update(self.snapshot())
        if found is None:
            return None
        ended = exit_status(found.pid) if found.pid is not None else ""
        log = find_log(self.run_dir, found.name.lower())
        return replace(
            found,
            what=found.what + (f"; it was {ended}" if ended else ""),
            log=str(log or ""),
            last_lines=tuple(last_lines(log)) if log else (),
        )

    def snapshot(self) -> Snapshot:
        """Return the current state of the run."""
        by_log: dict[Path, list[psutil.Process]] = {}
        for process in processes_of(self.run):
            if (log := self._log_of(process)) is not None:
                by_log.setdefault(log, []).append(process)
        workers = {name: _workers(group) for log, group in by_log.items() if (name := server_name(log))}
        orchestrator = next((log for log in by_log if log.name == ORCHESTRATOR_LOG), None)
        line = "" if orchestrator is None else _last_line(self.run_dir / "logs" / orchestrator)
        status = IN_FLIGHT.search(line)
        return Snapshot(
            at=time.monotonic(),
            orchestrator=orchestrator is not None,
            workers=workers,
            in_flight=int(status["count"]) if status else 0,
            returned=(status[0] if status else "", self._last_growth()),
        )

    def _log_of(self, process: psutil.Process) -> Path | None:
        """Return the log that a process writes to, relative to the folder of logs."""
        with suppress(OSError):
            path = Path(f"/proc/{process.pid}/fd/1").readlink()
            if path.is_relative_to(self.run_dir / "logs"):
                return path.relative_to(self.run_dir / "logs")
        return None

    def _last_growth(self) -> tuple[int, int]:
        """Return time and size of the newest of the files to which each returned episode is appended."""
        newest = 0, 0
        for path in growing_files(self.run_dir):
            with suppress(OSError):
                status = path.stat()
                newest = max(newest, (status.st_mtime_ns, status.st_size))
        return newest


def server_name(log: Path) -> str:
    """Return the name of the env server that writes this log, as `rl` names it; "" for other logs.

    Example:
        >>> server_name(Path("attempt_1/envs/train/harbor.log"))
        'train env server harbor'
    """
    parts = log.parts
    return f"{parts[2]} env server {log.stem}" if len(parts) == 4 and parts[1] == "envs" else ""


def exit_status(pid: int) -> str:
    """Return how a zombie process ended, such as "killed by signal 9"; "" if that is unknown."""
    with suppress(OSError, ValueError):
        status = int(Path(f"/proc/{pid}/stat").read_text().rsplit(maxsplit=1)[-1])
        if number := status & 0x7F:
            return f"killed by signal {number}"
        return f"ended with exit code {status >> 8}" if status else ""
    return ""


def _workers(group: list[psutil.Process]) -> frozenset[int]:
    """Return the workers among the processes that write to one env server's log: the server's spawned children."""
    parents: dict[int, int] = {}
    spawned: set[int] = set()
    for process in group:
        with suppress(psutil.Error):
            parents[process.pid] = process.ppid()
            if any(SPAWNED in word for word in process.cmdline()):
                spawned.add(process.pid)
    servers = {pid for pid, parent in parents.items() if pid not in spawned and parent not in parents}
    return frozenset(pid for pid in spawned if parents[pid] in servers)


def _last_line(log: Path) -> str:
    """Return the orchestrator's last status line."""
    with suppress(OSError):
        return next((line for line in reversed(last_lines(log)) if IN_FLIGHT.search(line)), "")
    return ""
