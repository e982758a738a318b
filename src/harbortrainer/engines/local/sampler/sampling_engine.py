"""The engine: requests in, completions out, and the hand-over of policies between them.

Contract: lives on one event loop (the server's); transformers' engine thread does the work. A request ends in a
`Completion` or in `EngineFailedError`; none hangs when the engine thread dies. One completion = one policy version.
"""

import asyncio
import math
import statistics
import time
from collections.abc import AsyncGenerator, Callable, Collection, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field

import torch
from transformers import PreTrainedModel

from harbortrainer.engines.batching_internals import GenerationOutput
from harbortrainer.engines.cache_size import batching_config
from harbortrainer.engines.local.sampler.continuous_batching import SeededManager
from harbortrainer.engines.local.sampler.draw import Draw, Policy, SamplingJob
from harbortrainer.engines.local.sampler.ledger import Completion, Ledger
from harbortrainer.engines.local.sampler.rescoring import (
    RecentSamples,
    SampledSequence,
    ScoredAgain,
    score_again,
)
from harbortrainer.engines.peft_internals import sampling_with

_TRIED = 64
"""Tokens that a model is tried with, half of them sampled."""


class EngineFailedError(RuntimeError):
    """The engine could not finish a request, or is gone."""


@dataclass
class EngineCounters:
    """Seconds and tokens since the start; `handover_s` and `handover_wait_s` are the last hand-over's: while nothing
    was sampled, and before that until the engine had time for it."""

    requests: int = 0
    failed: int = 0
    cancelled: int = 0
    prompt_tokens: int = 0
    sampled_tokens: int = 0
    handovers: int = 0
    handover_s: float = 0.0
    handover_wait_s: float = 0.0
    handover_total_s: float = 0.0


class Gate:
    """Who may be in the engine: counts who is inside and who waits. For one event loop, not for threads."""

    def __init__(self) -> None:
        self.inside = 0
        self.waiting = 0
        self._holds = 0
        self._changed = asyncio.Condition()

    @asynccontextmanager
    async def enter(self) -> AsyncGenerator[None]:
        """Waits until nobody keeps the gate shut; inside until the block ends."""
        async with self._changed:
            self.waiting += 1
            try:
                await self._changed.wait_for(lambda: not self._holds)
            finally:
                self.waiting -= 1
            self.inside += 1
        try:
            yield
        finally:
            # No lock and no await: a cancelled request must leave too.
            self.inside -= 1
            if not self.inside:
                _ = asyncio.ensure_future(self._notify())  # noqa: RUF006 (nothing to do with its result)

    @asynccontextmanager
    async def shut(self) -> AsyncGenerator[None]:
        """Keeps new requests waiting until the block ends, which begins when the last one inside has left."""
        self._holds += 1
        try:
            async with self._changed:
                await self._changed.wait_for(lambda: not self.inside)
            yield
        finally:
            self._holds -= 1
            await self._notify()

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()


@dataclass
class SamplingEngine:
    """Samples for the server.

    Attributes:
        model: Loaded for sampling (see `sampled_model.load_model`).
        max_model_len: Longest prompt plus completion.
        ledger: Where finished completions are entered.
        policy: What new requests are sampled by.
        cache_tokens: As `batching_config` takes them.
    """

    model: PreTrainedModel
    max_model_len: int
    ledger: Ledger
    policy: Policy = field(default_factory=Policy)
    cache_tokens: int | None = None
    counters: EngineCounters = field(default_factory=EngineCounters)

    def __post_init__(self) -> None:
        self.gate = Gate()
        self._before = self.policy
        self._pending: dict[str, asyncio.Future[GenerationOutput]] = {}
        self._sampling: dict[str, Policy] = {}
        # Of requests that were cancelled since the last hand-over: a forward pass may still meet them.
        self._left: set[Policy] = set()
        self._swap_lock = asyncio.Lock()
        self._recent = RecentSamples()
        self._manager = SeededManager(self.model, batching_config(self.model, self.max_model_len, self.cache_tokens))

    def start(self) -> None:
        """Allocates the cache and starts the engine thread; raises what the allocation raises."""
        loop = asyncio.get_running_loop()
        self._manager.on_end = lambda: loop.call_soon_threadsafe(self._fail_pending)
        self._manager.warmup()
        self._manager.start()

    async def stop(self) -> None:
        """Ends the engine thread; what is still running fails."""
        await asyncio.to_thread(self._manager.stop, timeout=30, hard_stop=True)
        self._fail_pending()

    @property
    def version(self) -> int:
        """The policy version that new requests are sampled by."""
        return self.policy.version

    @property
    def failure(self) -> BaseException | None:
        """What ended the engine thread, None while it runs."""
        return self._manager.failure

    def stats(self) -> dict[str, float]:
        """The counters and graph_passes; what holds now: running, waiting, cache_used_tokens, cache_tokens, version."""
        used, size = self._manager.cache_tokens()
        return asdict(self.counters) | {
            "running": len(self._pending),
            "waiting": self.gate.waiting,
            "cache_used_tokens": used,
            "cache_tokens": size,
            "version": self.version,
            "graph_passes": self._manager.graph_passes,
        }

    async def sample(self, job: SamplingJob) -> Completion:
        """Samples one completion and enters it in the ledger. Cancelling the call frees the request's slot.

        Raises:
            EngineFailedError: the engine is gone, or produced something that is not a probability.
        """
        async with self.gate.enter():
            policy = self.policy
            try:
                output = await self._submit(job, policy)
            except asyncio.CancelledError:
                self.counters.cancelled += 1
                raise
            except EngineFailedError:
                self.counters.failed += 1
                raise
            completion = Completion(
                job.session_id, job.request_id, len(job.prompt),
                tuple(output.generated_tokens), tuple(output.logprobs), policy.version, policy is not self.policy,
            )  # fmt: skip
        self.counters.requests += 1
        self.counters.prompt_tokens += completion.prompt_len
        self.counters.sampled_tokens += len(completion.token_ids)
        self.ledger.enter(completion)
        self._recent.keep(job.prompt, job.draw, completion)
        return completion

    async def score_again(self) -> list[ScoredAgain]:
        """Scores some of what the last two policies sampled since the last call once more; empty for nothing new.

        Sampling goes on beside it; a hand-over waits for it.
        """
        async with self._swap_lock, self.gate.enter():
            scored: list[ScoredAgain] = []
            for policy in (self._before, self.policy):
                chosen = self._recent.take(policy.version)
                scored += await asyncio.to_thread(self._score, policy, chosen)
            return scored

    async def disagreement(self) -> float:
        """Sample a few tokens, and score them in one forward pass; counted and entered nowhere.

        Returns:
            How far the two are apart, nats a token. A model whose attention does not ask for the cache says something
            else token by token.

        Raises:
            EngineFailedError: it cannot be sampled from at all.
        """
        vocab, length = self.model.config.get_text_config().vocab_size, min(_TRIED, self.max_model_len) // 2
        prompt = [(position + 1) * 7919 % vocab for position in range(length)]
        job = SamplingJob("tried", "", prompt, length, frozenset(), Draw(0))
        output = await self._submit(job, self.policy)
        sampled = tuple(output.generated_tokens), tuple(output.logprobs)
        sequence = SampledSequence("", self.version, job.draw.temperature)
        sequence.add(prompt, Completion("", job.request_id, length, *sampled, self.version))
        (scored,) = await asyncio.to_thread(self._score, self.policy, [sequence])
        return statistics.fmean(abs(one - two) for one, two in zip(scored.logprobs, scored.again, strict=True))

    def _score(self, policy: Policy, chosen: Sequence[SampledSequence]) -> list[ScoredAgain]:
        with sampling_with(policy.adapter):
            return score_again(self.model, chosen)

    async def _submit(self, job: SamplingJob, policy: Policy) -> GenerationOutput:
        self._raise_failure()
        future = self._pending[job.request_id] = asyncio.get_running_loop().create_future()
        self._sampling[job.request_id] = policy
        self._manager.submit(job, policy, lambda output: future.done() or future.set_result(output))
        try:
            output = await future
        except asyncio.CancelledError:
            self._manager.forget(job.request_id)
            self._left.add(policy)
            raise
        finally:
            self._pending.pop(job.request_id, None)
            self._sampling.pop(job.request_id, None)
        if output.error is not None:
            raise EngineFailedError(f"the engine failed on this request: {output.error}")
        if not all(map(math.isfinite, output.logprobs)):
            raise EngineFailedError("the model's output is not a distribution (NaN or infinite logits)")
        return output

    def _fail_pending(self) -> None:
        """Fails the waiting requests once the engine thread is gone: it answers nobody then."""
        for future in self._pending.values():
            if not future.done():
                future.set_exception(EngineFailedError(f"the engine has failed: {self.failure}"))

    def _raise_failure(self) -> None:
        if self.failure is not None:
            raise EngineFailedError(f"the engine has failed: {self.failure}")

    async def hand_over(self, load: Callable[[Collection[str | None]], str | None], version: int) -> float:
        """Makes an adapter the policy of new requests; the running ones go on by theirs.

        Args:
            load: Given the adapters that are in use, puts the new one into another and names that; None is the base.
            version: What the trainer calls it.

        Returns:
            Seconds during which nothing was sampled.

        Raises:
            EngineFailedError: the engine is gone.
            Whatever `load` raises; the old policy then stays.
        """
        async with self._swap_lock:
            self._raise_failure()
            in_use = {policy.adapter for policy in (self.policy, *self._sampling.values(), *self._left)}
            self._left.clear()
            began = time.perf_counter()
            policy, paused = await asyncio.to_thread(self._begin, lambda: load(in_use), version)
            self._before, self.policy = self.policy, policy
        return self._count(began, paused)

    async def swap(self, change: Callable[[], None], version: int) -> float:
        """Lets the running requests end, and applies `change` to the weights that all policies share.

        Returns:
            Seconds between the end of the last old request and the moment new ones may start.

        Raises:
            EngineFailedError: the engine is gone.
            Whatever `change` raises; the old version then stays.
        """
        async with self._swap_lock:
            began = time.perf_counter()
            async with self.gate.shut():
                await self._idle()
                adapter = self.policy.adapter
                self.policy, paused = await asyncio.to_thread(self._begin, lambda: change() or adapter, version)
                self._before = self.policy
        return self._count(began, paused)

    def _begin(self, change: Callable[[], str | None], version: int) -> tuple[Policy, float]:
        """The new policy, and when the engine had stopped for it."""
        with self._manager.pause():
            paused = time.perf_counter()
            policy = Policy(self.policy.serial + 1, version, change())
            self._manager.begin(policy)
            if self.model.device.type == "cuda":
                torch.cuda.synchronize(self.model.device)  # the engine computes on another stream
        return policy, paused

    def _count(self, began: float, paused: float) -> float:
        counters, seconds = self.counters, time.perf_counter() - paused
        counters.handovers += 1
        counters.handover_s, counters.handover_wait_s = seconds, paused - began
        counters.handover_total_s += seconds
        return seconds

    async def _idle(self) -> None:
        """Waits until cancelled requests have left the engine thread as well."""
        self._raise_failure()
        while self._manager.busy:
            await asyncio.sleep(0.001)
            self._raise_failure()
