"""Plays one rollout: from a task to a `Rollout`, with a bound on how many are in flight.

Invariant: every rollout that is started comes back, as a result or as a failure with its outcome; only cancellation,
a proof that fails, and a server that is gone come out as exceptions.
"""

import asyncio
import time
from typing import Any

from harbortrainer.engines.local.rollout import Rollout
from harbortrainer.engines.local.samples import rollout_of
from harbortrainer.engines.local.source import Source
from harbortrainer.trials.outcome import Outcome


class Player:
    """Runs episodes.

    Args:
        ledger: The sampler's ledger.
        seq_len: Most tokens of a sample.
        max_inflight: Most rollouts at once; None means no bound of our own.
    """

    def __init__(self, ledger: Any, *, seq_len: int, max_inflight: int | None) -> None:
        self.ledger, self.seq_len = ledger, seq_len
        self.slots = asyncio.Semaphore(max_inflight or 1_000_000)
        self.running = 0
        self._busy_s, self._since = 0.0, 0.0

    @property
    def busy_s(self) -> float:
        """Seconds in which at least one rollout was in flight."""
        return self._busy_s + (time.monotonic() - self._since if self.running else 0.0)

    async def play(self, source: Source, index: int, *, seed: int | None = None) -> Rollout:
        """Play task `index` of a source once, when there is a free slot.

        Raises:
            ProofError: The trace holds tokens that the sampler did not sample.
        """
        async with self.slots:
            self._since = self._since if self.running else time.monotonic()
            self.running += 1
            try:
                return await self._play(source, index, seed)
            finally:
                self._busy_s += 0.0 if self.running > 1 else time.monotonic() - self._since
                self.running -= 1

    async def _play(self, source: Source, index: int, seed: int | None) -> Rollout:
        task, key = source.name_of(index), source.key_of(index)
        try:
            episode = await source.run(index, seed=seed)
        except RuntimeError as error:
            # What the server answers to a request that it could not serve; its word is the message.
            outcome, message = str(Outcome.agent_error), " ".join(str(error).split())[:500]
            return Rollout(source=source.name, task=task, task_key=key, outcome=outcome, error=message)
        completions = [entry for trace in episode.traces for entry in self.ledger.take(trace.id)]
        # Long traces take a while to walk; the event loop has requests to answer.
        return await asyncio.to_thread(
            rollout_of,
            episode,
            completions,
            source=source.name,
            task=task,
            task_key=key,
            temperature=source.temperature,
            seq_len=self.seq_len,
        )
