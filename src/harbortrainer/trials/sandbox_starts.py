"""Starts of sandboxes at a provider: their rate, and a hold while most of them fail.

- Rate. A token bucket, with the user's rate or the provider's own: each refusal (429) halves it, each start raises it.
- Hold. After a 429 no sandbox starts for the time of its Retry-After. While most recent starts fail, only one at a time
  starts, after growing pauses with jitter.
- A refused start is excused, and so is one that fails, or hangs until its time limit, while a quarter of the recent
  ones fail. It is no attempt of its episode, and is repeated. Only the agent's sandbox is excused: when a separate
  verifier's sandbox starts, the agent's tokens are recorded.
- End. A provider is given up if no sandbox started and none ran for `GIVE_UP_S`, or for `DENIED_S` if it denied every
  start (401, 402, 403: a wrong key). The launcher, which watches them (`start_watch`), then ends the run. Without
  a launcher failures count as attempts again.
- Broken tasks. A task that failed `_BROKEN` times in a row while others start is at fault itself: its failures are
  attempts, and do not count for the hold.

`StartState` is the state machine, without I/O. All workers share it as a file beside the trials, since a provider
counts their starts together; aiolimiter and its like count one process.

Invariant: a start is excused only if another one may succeed, and never longer than `GIVE_UP_S` after the last sign of
life.
"""

import asyncio
import contextlib
import logging
import random
import re
import time
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from pydantic import BaseModel, ValidationError

from harbortrainer.runs.locks import held, try_lock
from harbortrainer.sandbox.errors_and_changes import SandboxStartError
from harbortrainer.trials.provider_faults import is_denied, retry_after_s

if TYPE_CHECKING:
    from harbor.environments.base import BaseEnvironment

STARTS = ".starts"
"""Folder beside the trials with the state of each provider."""
IN_USE = ".in_use"
"""File in that folder. Each process that starts sandboxes holds a shared lock on it, so a launcher sees its run."""
_RUNNING = ".running"
"""Suffix of a provider's file on which each process with a running sandbox holds a shared lock."""
GIVE_UP_S, DENIED_S = 1800.0, 120.0
_WINDOW, _LEAST, _RECENT_S = 20, 10, 120.0
"""Recent results that count, least number of them that shows a failing provider, and seconds for which they count."""
_FORGOTTEN_S = 600.0
_BROKEN = 8
"""Failures in a row of one task; with fewer, an outage that only some starts survive looks like a broken task."""
_HOLDS_FROM, _EXCUSES_FROM = 0.5, 0.25
"""Shares of failed starts above which new ones are held, and failures are the provider's and not one task's."""
_FIRST_HOLD_S, _LONGEST_HOLD_S = 2.0, 30.0
_FIRST_RATE, _LEAST_RATE, _RAISE = 32.0, 0.2, 0.05
"""Starts a second after the first refusal, and least; a start's rise."""
_LONGEST_SLEEP_S = 1.0
_NAME = re.compile(r"[^\w.-]+")
_log = logging.getLogger(__name__)


class StartState(BaseModel):
    """Starts at one provider. Times are seconds since the epoch."""

    rate: float | None = None
    """Starts a second; None for no limit."""
    tokens: float = 1.0
    counted: float = 0.0
    """Time at which `tokens` was right."""
    slowed: float = 0.0
    """Time of the last reduction of `rate`."""
    held_until: float = 0.0
    holds: int = 0
    """Holds since most starts failed; 0 if most succeed."""
    probing: bool = False
    """Whether one start was admitted during a hold, and its result is not known yet."""
    results: list[tuple[float, bool, str]] = []
    """Time of recent starts, whether each succeeded, and its task."""
    failing: dict[str, int] = {}
    """Failures in a row by task."""
    ended: float = 0.0
    """Time of the last start's end."""
    failing_since: float | None = None
    """Time of the first failure since the last good start, and since a sandbox ran."""
    denied_since: float | None = None
    """Time of the first of consecutive denials; None if the last failure was another one."""
    given_up: bool = False
    """Whether the provider has failed for so long that the run should end."""
    fault: str = ""
    """The provider's words for the last failure."""

    def wait_s(self, now: float, most: float | None) -> float:
        """Return the seconds to wait before a start; 0 admits it, and takes its token.

        Args:
            now: The current time.
            most: The user's limit in starts a second; None for none.
        """
        if now < self.held_until:
            return self.held_until - now
        rate = min(filter(None, [self.rate, most]), default=None)
        if rate is not None:
            self.tokens = min(max(1.0, rate), self.tokens + (now - self.counted) * rate)
            self.counted = now
            if self.tokens < 1:
                return (1 - self.tokens) / rate
            self.tokens -= 1
        if self.holds:  # the others wait for this start's result
            self.held_until, self.probing = now + _LONGEST_HOLD_S, True
        return 0.0

    def succeed(self, now: float, task: str = "") -> None:
        """Count a good start."""
        self.failing.pop(task, None)
        self.results = [*self.results, (now, True, task)][-_WINDOW:]
        self.ended, self.failing_since, self.denied_since, self.given_up = now, None, None, False
        if self.probing:
            self.held_until, self.probing = now, False
        if not self._share_failed(now) > _HOLDS_FROM:
            self.holds = 0
        if self.rate is not None:
            self.rate += _RAISE

    def fail(
        self,
        now: float,
        fault: str,
        retry_after_s: float | None,
        jitter: float = 1.0,
        *,
        task: str = "",
        denied: bool = False,
        running: bool = False,
    ) -> bool:
        """Count a failed start. Returns whether it is excused.

        Args:
            now: The current time.
            fault: The provider's words.
            retry_after_s: Seconds that the provider asked to wait; None if it refused nothing.
            jitter: Factor of the hold, about 1.
            task: The task's name or key.
            denied: Whether the provider denied access, so that only the user can help.
            running: Whether an earlier sandbox still runs.
        """
        self.fault = fault
        if retry_after_s is None and self._is_broken(task, now):
            if self.probing:  # it tells nothing about the provider
                self.held_until, self.probing = now, False
            return False
        if self.failing_since is None or running:
            self.failing_since, self.denied_since = now, None
        elif now - self.ended > _FORGOTTEN_S:  # an earlier run's
            self.failing_since, self.denied_since, self.holds = now, None, 0
        if not denied:
            self.denied_since = None
        elif self.denied_since is None:
            self.denied_since = now
        self.ended = now
        if retry_after_s is not None:
            self.held_until = max(self.held_until, now + retry_after_s)
            if now - self.slowed >= 1:  # one reduction for all that were refused together
                self.rate = max(_LEAST_RATE, self.rate / 2) if self.rate is not None else _FIRST_RATE
                self.slowed = now
        else:
            self.results = [*self.results, (now, False, task)][-_WINDOW:]
            # Starts that were in flight when the hold began do not lengthen it.
            # During a hold, too few start to tell a share.
            most_fail = self.holds > 0 or self._share_failed(now) > _HOLDS_FROM
            if most_fail and (self.probing or now >= self.held_until):
                pause_s = jitter * min(_LONGEST_HOLD_S, _FIRST_HOLD_S * 2**self.holds)
                self.held_until, self.holds, self.probing = now + pause_s, min(self.holds + 1, 10), False
        excusable = retry_after_s is not None or self.holds > 0 or self._share_failed(now) > _EXCUSES_FROM
        denied_s = 0.0 if self.denied_since is None else now - self.denied_since
        self.given_up = excusable and (now - self.failing_since >= GIVE_UP_S or denied_s >= DENIED_S)
        return excusable and not self.given_up

    def _is_broken(self, task: str, now: float) -> bool:
        """Count a task's failure. Returns whether the task is at fault: it fails while others start."""
        self.failing[task] = self.failing.get(task, 0) + 1
        others = any(good and other != task and now - moment < _RECENT_S for moment, good, other in self.results)
        return others and self.failing[task] > _BROKEN

    def _share_failed(self, now: float) -> float:
        """Share of the recent starts that failed; 0 if there are too few to tell."""
        recent = [good for moment, good, _ in self.results if now - moment < _RECENT_S]
        return 1 - sum(recent) / len(recent) if len(recent) >= _LEAST else 0.0

    def __str__(self) -> str:
        failed = sum(not good for _, good, _ in self.results)
        return f"{failed} of the last {len(self.results)} starts failed, the last with {self.fault}"


@dataclass
class Start:
    """One admitted start of a trial's sandbox."""

    gate: "StartGate | None" = None
    waited_s: float = 0.0
    task: str = ""
    excused: bool = False
    """Whether the sandbox did not start, and the trial should be played again without counting an attempt."""
    has_sandbox: bool = False
    """Whether the agent's sandbox has started; a later one is a separate verifier's."""
    unanswered: bool = False
    """Whether the agent's sandbox was cancelled while it started, so that its failure is not counted yet."""

    async def count_timeout(self, fault: str) -> None:
        """Count a start that its time limit cancelled."""
        if self.gate is not None and self.unanswered:
            self.excused = await self.gate.failed(TimeoutError(fault), self.task)

    def end(self) -> None:
        """Note that the trial has ended."""
        if self.gate is not None and self.has_sandbox:
            self.gate.ended()


CURRENT: ContextVar[Start | None] = ContextVar("start", default=None)
"""The start of the trial that runs in this task."""


class StartGate:
    """The starts at one provider, as seen by one process.

    Args:
        trials: The folder of the trials, which the provider's processes share.
        provider: The environment type.
        most: The user's limit in starts a second.
    """

    def __init__(self, trials: Path, provider: str, most: float | None) -> None:
        self._path = trials / STARTS / f"{_NAME.sub('-', provider)}.json"
        self._provider, self._most = provider, most
        self._file: FileIO | None = None
        self._mark: TextIO | None = None
        self._is_marked = False
        self._queue = asyncio.Lock()
        self._running = 0
        """Trials of this process whose sandbox has started."""
        self._running_mark: TextIO | None = None

    async def admit(self, task: str) -> Start:
        """Wait until a sandbox of this task may start."""
        began = time.monotonic()
        async with self._queue:  # so that one waiter a process looks at the file
            while True:
                wait_s = await self._update(lambda state: state.wait_s(time.time(), self._most))
                if wait_s <= 0:
                    return Start(self, time.monotonic() - began, task)
                await asyncio.sleep(min(wait_s, _LONGEST_SLEEP_S) * random.uniform(1, 1.2))

    async def succeeded(self, task: str, *, of_agent: bool) -> None:
        """Count a good start. `of_agent` says whether the sandbox is the agent's, which runs until `ended`."""

        def succeed(state: StartState) -> bool:
            if of_agent:
                self._running += 1
                if self._running_mark is None:
                    self._running_mark = self._path.with_suffix(_RUNNING).open("a")
                    try_lock(self._running_mark, shared=True)
            held = state.holds > 0
            state.succeed(time.time(), task)
            return held and not state.holds

        if await self._update(succeed):
            _log.warning("sandboxes of %s start again", self._provider)

    def ended(self) -> None:
        """Note that an agent's sandbox has ended."""
        self._running -= 1
        if not self._running and self._running_mark is not None:
            self._running_mark.close()
            self._running_mark = None

    def _none_runs(self) -> bool:
        """Whether no process has a running sandbox. The caller holds the state's lock, so none is marked meanwhile."""
        with self._path.with_suffix(_RUNNING).open("a") as mark:
            return try_lock(mark)

    async def failed(self, error: Exception, task: str) -> bool:
        """Count a failed start. Returns whether it is excused."""
        words = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        jitter = random.uniform(0.75, 1.25)

        def fail(state: StartState) -> tuple[bool, str]:
            denied, running = is_denied(error), not self._none_runs()
            now, after_s = time.time(), retry_after_s(error)
            excused = state.fail(now, words, after_s, jitter, task=task, denied=denied, running=running)
            return excused, str(state) if state.holds == 1 else ""

        excused, hold = await self._update(fail)
        if hold:
            _log.warning("holding new sandboxes of %s: %s", self._provider, hold)
        return excused

    async def _update[T](self, change: Callable[[StartState], T]) -> T:
        """Change the shared state. The file stays open: opening it takes most of an update's CPU."""
        if self._file is None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._path.touch()
            self._file = self._path.open("r+b", buffering=0)
            self._mark = self._path.with_name(IN_USE).open("a")
        if not self._is_marked and self._mark is not None:
            self._is_marked = try_lock(self._mark, shared=True)  # fails while a launcher empties the states
        async with held(self._file):
            self._file.seek(0)
            before = self._file.read()
            state = parse_state(before)
            result = change(state)
            after = state.model_dump_json().encode().ljust(len(before))  # as long, so that one call replaces it
            if after != before:
                self._file.seek(0)
                self._file.write(after)
        return result


def read_state(path: Path) -> StartState:
    """Return the state in a file; a new one if there is none."""
    with contextlib.suppress(OSError):
        return parse_state(path.read_bytes())
    return StartState()


def parse_state(content: bytes) -> StartState:
    """Return the state in a file's content; a new one if it is empty, or a killed process left it torn."""
    with contextlib.suppress(ValidationError):
        return StartState.model_validate_json(content)
    return StartState()


def report_start(environment: "BaseEnvironment") -> None:
    """Wrap `start` of a sandbox, so that its result counts for the current trial's gate.

    A separate verifier's sandbox that does not start raises SandboxStartError: Harbor would blame the verifier.
    """
    start: Callable[[bool], Awaitable[None]] = environment.start

    async def reported(force_build: bool) -> None:
        current = CURRENT.get()
        if current is None or current.gate is None:
            await start(force_build)
            return
        try:
            await start(force_build)
        except asyncio.CancelledError:
            current.unanswered = not current.has_sandbox
            raise
        except Exception as error:
            excused = await current.gate.failed(error, current.task)
            if not current.has_sandbox:
                current.excused = excused
                raise
            words = " ".join(f"{type(error).__name__}: {error}".split())
            raise SandboxStartError(f"the verifier's sandbox did not start: {words}") from error
        await current.gate.succeeded(current.task, of_agent=not current.has_sandbox)
        current.has_sandbox = True

    setattr(environment, "start", reported)  # noqa: B010 - this object only
