"""What the engine sampled, request by request: the other half of the proof.

The trainer gets tokens and log-probabilities through the environment, which renders, branches and serializes them.
The ledger keeps what the sampler itself gave away, so that the two can be compared.

Invariant: a `Completion` is entered once, complete, when its request ended; a cancelled or failed request is never
entered. Thread-safe.
"""

import threading
from collections import OrderedDict
from dataclasses import dataclass


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
    """

    session_id: str
    request_id: str
    prompt_len: int
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    version: int


class Ledger:
    """Completions by session, in the order in which they ended.

    Args:
        max_sessions: Sessions kept; the one that was written to longest ago is dropped beyond it, so that a server
            nobody takes from does not grow without bound.
    """

    def __init__(self, max_sessions: int = 20_000) -> None:
        self._max_sessions = max_sessions
        self._sessions: OrderedDict[str, list[Completion]] = OrderedDict()
        self._lock = threading.Lock()

    def enter(self, completion: Completion) -> None:
        """Adds one finished request."""
        with self._lock:
            self._sessions.setdefault(completion.session_id, []).append(completion)
            self._sessions.move_to_end(completion.session_id)
            while len(self._sessions) > self._max_sessions:
                self._sessions.popitem(last=False)

    def take(self, session_id: str) -> list[Completion]:
        """Removes and returns the session's completions, oldest first; empty for a session never seen."""
        with self._lock:
            return self._sessions.pop(session_id, [])

    def peek(self, session_id: str) -> list[Completion]:
        """The session's completions, left in place."""
        with self._lock:
            return list(self._sessions.get(session_id, ()))
