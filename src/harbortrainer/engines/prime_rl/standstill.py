"""When a run on Prime-RL stands still: a state machine without I/O.

verifiers' pool neither starts a dead worker again nor lets a request time out, and the orchestrator waits for each
episode without a limit: what a worker held when it died holds its permits for ever. Invariant: a run that ends, however
it ends, and a trainer that takes its time are no standstill.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

GONE_S = 15.0
"""How long a worker has to be missing while its server and the orchestrator live. An orderly end takes less."""


@dataclass(frozen=True)
class Sight:
    """What was seen of a run at one moment.

    Args:
        at: Seconds, of a clock that never goes back.
        orchestrator: Whether it lives.
        workers: Process ids of the workers of each env server that lives, by its name.
        in_flight: Episodes that the orchestrator waits for, as it said last.
        returned: Something that is another thing once an episode has come back.
    """

    at: float
    orchestrator: bool = False
    workers: Mapping[str, frozenset[int]] = field(default_factory=dict)
    in_flight: int = 0
    returned: object = None


@dataclass(frozen=True)
class Standstill:
    """Why a run will not go on by itself.

    Args:
        what: What happened, without a full stop.
        name: The process to blame: an env server, or the orchestrator.
        do: What the user can do about it.
        pid: The worker that is gone.
        log: The log of the process to blame, where it has one.
        last_lines: Its end, as it was before anything was ended.
    """

    what: str
    name: str
    do: str
    pid: int | None = None
    log: str = ""
    last_lines: tuple[str, ...] = ()


class StandstillWatch:
    """Follows a run from sight to sight.

    Args:
        longest_s: The longest that an episode may take; None switches the watch over progress off.
    """

    def __init__(self, longest_s: float | None) -> None:
        self.longest_s = longest_s
        self._known: dict[str, set[int]] = {}
        self._missing_since: dict[int, float] = {}
        self._returned: object = None
        self._moved_at = 0.0

    def look(self, sight: Sight) -> Standstill | None:
        """Take a sight in; what stands still, if anything does."""
        return self._worker_gone(sight) or self._nothing_returns(sight)

    def _worker_gone(self, sight: Sight) -> Standstill | None:
        self._known = {name: pids for name, pids in self._known.items() if name in sight.workers}
        missing: set[tuple[str, int]] = set()
        for name, pids in sight.workers.items():
            known = self._known.setdefault(name, set())
            known |= pids
            missing |= {(name, pid) for pid in known - pids}
        if not sight.orchestrator:
            missing = set()
        gone = {pid for _, pid in missing}
        self._missing_since = {pid: self._missing_since.get(pid, sight.at) for pid in gone}
        for name, pid in sorted(missing):
            if sight.at - self._missing_since[pid] >= GONE_S:
                return Standstill(
                    f"a worker of the {name} is gone (process {pid}), and with it the trials that it held",
                    name,
                    "give the machine more memory or lower the trials in flight when it was killed for memory",
                    pid,
                )
        return None

    def _nothing_returns(self, sight: Sight) -> Standstill | None:
        idle = not sight.orchestrator or sight.in_flight == 0
        if idle or sight.returned != self._returned:
            self._returned, self._moved_at = sight.returned, sight.at
            return None
        quiet_s = sight.at - self._moved_at
        if self.longest_s is None or quiet_s <= self.longest_s:
            return None
        return Standstill(
            f"no trial came back for {quiet_s / 60:.0f} min, longer than any may take ({self.longest_s / 60:.0f} min, "
            f"retries included), although the orchestrator waits for {sight.in_flight}",
            "orchestrator",
            "look at the env servers' logs beside it, and at the engine's",
        )
