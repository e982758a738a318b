"""What the engine sampled, request by request: the other half of the proof.

The trainer gets tokens and log-probabilities through the environment, which renders, branches and serializes them.
The ledger keeps what the sampler itself gave away, so that the two can be compared.

Invariant: a `Completion` is entered once, complete, when its request ended; a cancelled or failed request is never
entered. Thread-safe.
"""

import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from harbortrainer.errors import ProofError


@dataclass(frozen=True, slots=True)
class Completion:
    """One request as the engine answered it.

    Attributes:
        session_id: The caller's `X-Session-ID` (verifiers sends the trace's id), "" when it sent none.
        request_id: The id in the reply.
        prompt_len: Tokens in the prompt.
        token_ids: The sampled tokens, the stop token included.
        logprobs: Their log-probabilities (nats) under the distribution they were drawn from; same length.
        version: The policy version that sampled all of them.
        overtaken: Whether a hand-over came while it ran.
    """

    session_id: str
    request_id: str
    prompt_len: int
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    version: int
    overtaken: bool = False


@dataclass(slots=True)
class _Session:
    completions: list[Completion] = field(default_factory=list)
    last: int = 0
    """How many completions there had ever been with its last one."""


class Ledger:
    """Completions by session, in the order in which they ended.

    Args:
        max_sessions: Sessions kept; the one that was written to longest ago is dropped beyond it, so that a server
            nobody takes from does not grow without bound.
    """

    def __init__(self, max_sessions: int = 20_000) -> None:
        self._max_sessions = max_sessions
        self._sessions: OrderedDict[str, _Session] = OrderedDict()
        self._entered = 0
        self._lock = threading.Lock()

    @property
    def entered(self) -> int:
        """How many completions there have ever been."""
        return self._entered

    def enter(self, completion: Completion) -> None:
        """Adds one finished request."""
        with self._lock:
            self._entered += 1
            session = self._sessions.setdefault(completion.session_id, _Session())
            session.completions.append(completion)
            session.last = self._entered
            self._sessions.move_to_end(completion.session_id)
            while len(self._sessions) > self._max_sessions:
                self._sessions.popitem(last=False)

    def take(self, session_id: str) -> list[Completion]:
        """Removes and returns the session's completions, oldest first; empty for a session never seen."""
        with self._lock:
            return self._sessions.pop(session_id, _Session()).completions

    def peek(self, session_id: str) -> list[Completion]:
        """The session's completions, left in place."""
        with self._lock:
            return list(self._sessions.get(session_id, _Session()).completions)

    def forget(self, first: int) -> None:
        """Drops the sessions that have none but of the `first` completions that there ever were."""
        with self._lock:
            while self._sessions and next(iter(self._sessions.values())).last <= first:
                self._sessions.popitem(last=False)


def match_completions(
    turns: Sequence[tuple[Sequence[int], Sequence[float]]], completions: Sequence[Completion], *, where: str = ""
) -> list[Completion]:
    """For each sampled turn of a trace, the completion of the engine's ledger that it is.

    The tokens must be equal, and the log-probabilities too (1e-6, what a journey through JSON may cost).
    Every completion serves one turn at most; those that no turn uses are the caller's to judge.

    Args:
        turns: (token ids, log-probabilities) of each sampled node of the trace, in order.
        completions: What the engine sampled in this session, in order.
        where: Task and trial in words, for the message.

    Raises:
        ProofError: A turn was not sampled by this engine as it stands in the trace.
    """
    left = list(completions)
    matched = []
    for number, (token_ids, logprobs) in enumerate(turns):
        same = [c for c in left if list(c.token_ids) == list(token_ids)]
        found = next((c for c in same if _equal(c.logprobs, logprobs)), None)
        if found is None:
            what = "log-probabilities" if same else "tokens"
            raise ProofError(
                f"{where + ': ' if where else ''}the {what} of sampled turn {number} ({len(token_ids)} tokens) "
                f"are not what the engine sampled ({len(left)} completions of this trial are left)"
            )
        left = [c for c in left if c is not found]
        matched.append(found)
    return matched


def _equal(one: Sequence[float], other: Sequence[float]) -> bool:
    return len(one) == len(other) and all(abs(a - b) <= 1e-6 for a, b in zip(one, other, strict=True))
