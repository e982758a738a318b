"""Detection of stalled Prime-RL runs: a state machine without I/O.

verifiers' pool neither restarts a dead worker nor lets a request time out, and the orchestrator waits for each episode
without a limit. So the episodes of a dead worker occupy their share of the concurrency forever.

Invariant: a run that ends, and a slow trainer, are no stall.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

WORKER_MISSING_TIMEOUT_S = 15.0
"""Seconds for which a worker must be missing while its server and the orchestrator live; a normal end takes less."""


@dataclass(frozen=True)
class Snapshot:
    """State of a run at one moment.

    Args:
        at: Seconds of a monotonic clock.
        orchestrator: Whether the orchestrator lives.
        workers: Process ids of the workers of each live env server, by the server's name.
        in_flight: Episodes in flight, from the orchestrator's last status line.
        returned: A value that changes when an episode returns.
    """

    at: float
    orchestrator: bool = False
    workers: Mapping[str, frozenset[int]] = field(default_factory=dict)
    in_flight: int = 0
    returned: object = None


@dataclass(frozen=True)
class Stall:
    """The reason why a run makes no progress.

    Args:
        what: What happened, without a full stop.
        name: The process that caused it: an env server or the orchestrator.
        do: Advice for the user.
        pid: Process id of the worker that exited.
        log: Log of that process, if it has one.
        last_lines: Last lines of the log, read before any process was ended.
        restart_helps: Whether the run may continue if it is restarted as it is.
    """

    what: str
    name: str
    do: str
    pid: int | None = None
    log: str = ""
    last_lines: tuple[str, ...] = ()
    restart_helps: bool = True


class StallDetector:
    """Detects a stall from consecutive snapshots.

    Args:
        episode_limit_s: Maximum seconds of an episode; None detects missing workers only.
    """

    def __init__(self, episode_limit_s: float | None) -> None:
        self.episode_limit_s = episode_limit_s
        self._known: dict[str, set[int]] = {}
        self._missing_since: dict[int, float] = {}
        self._returned: object = None
        self._moved_at = 0.0

    def update(self, snapshot: Snapshot) -> Stall | None:
        """Add a snapshot, and return the stall if there is one."""
        return self._worker_gone(snapshot) or self._nothing_returns(snapshot)

    def _worker_gone(self, snapshot: Snapshot) -> Stall | None:
        self._known = {name: pids for name, pids in self._known.items() if name in snapshot.workers}
        missing: set[tuple[str, int]] = set()
        for name, pids in snapshot.workers.items():
            known = self._known.setdefault(name, set())
            known |= pids
            missing |= {(name, pid) for pid in known - pids}
        if not snapshot.orchestrator:
            missing = set()
        gone = {pid for _, pid in missing}
        self._missing_since = {pid: self._missing_since.get(pid, snapshot.at) for pid in gone}
        for name, pid in sorted(missing):
            if snapshot.at - self._missing_since[pid] >= WORKER_MISSING_TIMEOUT_S:
                return Stall(
                    f"a worker of the {name} exited (process {pid}), and its trials are lost",
                    name,
                    "if it was killed for lack of memory, use more memory or fewer trials in flight",
                    pid,
                )
        return None

    def _nothing_returns(self, snapshot: Snapshot) -> Stall | None:
        idle = not snapshot.orchestrator or snapshot.in_flight == 0
        if idle or snapshot.returned != self._returned:
            self._returned, self._moved_at = snapshot.returned, snapshot.at
            return None
        quiet_s = snapshot.at - self._moved_at
        if self.episode_limit_s is None or quiet_s <= self.episode_limit_s:
            return None
        return Stall(
            f"no trial returned for {quiet_s / 60:.0f} min, longer than any may take "
            f"({self.episode_limit_s / 60:.0f} min with retries), although the orchestrator waits for "
            f"{snapshot.in_flight}",
            "orchestrator",
            "see the logs of the env servers in the same folder, and of the inference server",
        )
