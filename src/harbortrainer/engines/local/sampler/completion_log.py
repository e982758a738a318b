"""A log of what the engine sampled, request by request.

The trainer gets tokens and log-probabilities through the environment, which renders, branches and serializes them.
The log keeps the sampler's own copy, so that the two can be compared.

Invariant: a `Completion` is added once, complete, when its request ends. A cancelled or failed request is never added.
Thread-safe.
"""

import math
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from harbortrainer.errors import ProofError


@dataclass(frozen=True, slots=True)
class Completion:
    """One finished request.

    Attributes:
        session_id: The caller's `X-Session-ID` (verifiers sends the trace's id), "" if it sent none.
        request_id: The id in the reply.
        prompt_len: Tokens in the prompt.
        token_ids: The sampled tokens, including the stop token.
        logprobs: Their log-probabilities (nats) under the distribution they were drawn from; same length.
        version: The policy version that sampled all of them.
        crossed_update: Whether a weight update came while it ran.
    """

    session_id: str
    request_id: str
    prompt_len: int
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    version: int
    crossed_update: bool = False

    @property
    def weight_versions(self) -> list[dict[str, str | int]]:
        """The policy version of each span of tokens, in the form of vLLM 0.32's reply; one version samples them all."""
        return [{"version": str(self.version), "start": 0, "end": len(self.token_ids)}]


MAX_SESSIONS = 20_000
"""Sessions that a log keeps. Beyond it the least recently extended one is evicted, so that the log cannot grow without
bound if the caller never pops."""


@dataclass(slots=True)
class _Session:
    completions: list[Completion] = field(default_factory=list)
    last: int = 0
    """The log's `total` right after this session's last completion."""


class CompletionLog:
    """Finished completions by session, in the order in which they ended."""

    def __init__(self) -> None:
        self._sessions: OrderedDict[str, _Session] = OrderedDict()
        self._total = 0
        self._discarded_tokens = 0
        self._lock = threading.Lock()

    @property
    def total(self) -> int:
        """Number of completions ever added."""
        return self._total

    @property
    def discarded_tokens(self) -> int:
        """Sampled tokens of all completions that were dropped and never returned by `pop`."""
        return self._discarded_tokens

    def add(self, completion: Completion) -> None:
        """Add one finished request."""
        with self._lock:
            self._total += 1
            session = self._sessions.setdefault(completion.session_id, _Session())
            session.completions.append(completion)
            session.last = self._total
            self._sessions.move_to_end(completion.session_id)
            while len(self._sessions) > MAX_SESSIONS:
                self._drop_oldest()

    def pop(self, session_id: str) -> list[Completion]:
        """Remove and return the session's completions, oldest first; empty for an unknown session."""
        with self._lock:
            return self._sessions.pop(session_id, _Session()).completions

    def peek(self, session_id: str) -> list[Completion]:
        """Return the session's completions without removing them."""
        with self._lock:
            return list(self._sessions.get(session_id, _Session()).completions)

    def evict(self, first: int) -> None:
        """Drop every session whose completions are all among the `first` ones ever added."""
        with self._lock:
            while self._sessions and next(iter(self._sessions.values())).last <= first:
                self._drop_oldest()

    def _drop_oldest(self) -> None:
        _, session = self._sessions.popitem(last=False)
        self._discarded_tokens += sum(len(completion.token_ids) for completion in session.completions)


def match_completions(
    turns: Sequence[tuple[Sequence[int], Sequence[float]]], completions: Sequence[Completion], *, where: str = ""
) -> list[Completion]:
    """Return the logged completion of each sampled turn of a trace.

    Tokens must be equal. Log-probabilities must agree up to the error of a round trip through JSON or float32. A
    completion matches at most one turn. The caller decides what unmatched completions mean.

    Args:
        turns: (token ids, log-probabilities) of each sampled node of the trace, in order.
        completions: The session's completions, in order.
        where: Task and trial, for the error message.

    Raises:
        ProofError: No remaining completion matches a turn.
    """
    remaining = list(completions)
    matched = []
    for number, (token_ids, logprobs) in enumerate(turns):
        same_tokens = [c for c in remaining if list(c.token_ids) == list(token_ids)]
        found = next((c for c in same_tokens if equal_logprobs(c.logprobs, logprobs)), None)
        if found is None:
            what = "log-probabilities" if same_tokens else "tokens"
            raise ProofError(
                f"{where + ': ' if where else ''}the {what} of sampled turn {number} ({len(token_ids)} tokens) "
                f"are not what the engine sampled ({len(remaining)} unmatched completions of this trial remain)"
            )
        remaining = [c for c in remaining if c is not found]
        matched.append(found)
    return matched


def equal_logprobs(one: Sequence[float], other: Sequence[float]) -> bool:
    """Whether log-probabilities agree up to the error of a round trip through JSON or float32."""
    pairs = zip(one, other, strict=True)
    return len(one) == len(other) and all(math.isclose(a, b, rel_tol=1e-7, abs_tol=1e-6) for a, b in pairs)
