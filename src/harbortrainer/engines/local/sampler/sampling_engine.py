"""The sampling engine: requests in, completions out, with weight updates in between.

Contract: it runs on one event loop (the server's), and an engine thread computes: transformers' continuous batching, or
`generate` for models that it cannot sample. A request ends with a `Completion` or an `EngineFailedError`; none hangs if
the engine thread dies. One policy version samples a completion.
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
from harbortrainer.engines.local.sampler.completion_log import Completion, CompletionLog
from harbortrainer.engines.local.sampler.continuous_batching import SeededManager
from harbortrainer.engines.local.sampler.plain_batching import PlainManager, PlainOutput
from harbortrainer.engines.local.sampler.rescoring import (
    RecentSamples,
    Rescored,
    SampledSequence,
    rescore,
)
from harbortrainer.engines.local.sampler.sampling_params import PolicyVersion, SamplingJob, SamplingParams
from harbortrainer.engines.memory_parts import batching_config
from harbortrainer.engines.models import needs_plain_sampling
from harbortrainer.engines.peft_internals import use_adapter

_SELF_CHECK_TOKENS = 64
"""Tokens of the self-check at the start, half of them sampled."""


class EngineFailedError(RuntimeError):
    """The engine could not finish a request, or has ended."""


@dataclass
class EngineCounters:
    """Counts of requests and tokens since the start."""

    requests: int = 0
    failed: int = 0
    cancelled: int = 0
    prompt_tokens: int = 0
    sampled_tokens: int = 0


class Gate:
    """Admits requests to the engine, and can be closed for a weight update. Not thread-safe: use it on one event loop.

    Attributes:
        inside: Admitted requests.
        waiting: Requests that wait to be admitted.
    """

    def __init__(self) -> None:
        self.inside = 0
        self.waiting = 0
        self._closers = 0
        self._changed = asyncio.Condition()

    @asynccontextmanager
    async def enter(self) -> AsyncGenerator[None]:
        """Wait until the gate is open; the caller is inside until the block ends."""
        async with self._changed:
            self.waiting += 1
            try:
                await self._changed.wait_for(lambda: not self._closers)
            finally:
                self.waiting -= 1
            self.inside += 1
        try:
            yield
        finally:
            # Neither lock nor await, so that a cancelled request leaves too.
            self.inside -= 1
            if not self.inside:
                _ = asyncio.ensure_future(self._notify())  # noqa: RUF006 (its result is unused)

    @asynccontextmanager
    async def close(self) -> AsyncGenerator[None]:
        """Keep new requests waiting until the block ends. The block starts once the last one inside has left."""
        self._closers += 1
        try:
            async with self._changed:
                await self._changed.wait_for(lambda: not self.inside)
            yield
        finally:
            self._closers -= 1
            await self._notify()

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()


@dataclass
class SamplingEngine:
    """Samples completions for the server.

    Attributes:
        model: Loaded for sampling (see `sampled_model.load_model`).
        max_model_len: Longest prompt plus completion, in tokens.
        completion_log: Receives finished completions.
        policy: The policy version of new requests.
        cache_tokens: The `planned` argument of `batching_config`.
    """

    model: PreTrainedModel
    max_model_len: int
    completion_log: CompletionLog
    policy: PolicyVersion = field(default_factory=PolicyVersion)
    cache_tokens: int | None = None
    counters: EngineCounters = field(default_factory=EngineCounters)

    def __post_init__(self) -> None:
        self.gate = Gate()
        self._previous = self.policy
        self._pending: dict[str, asyncio.Future[GenerationOutput | PlainOutput]] = {}
        self._running: dict[str, PolicyVersion] = {}
        # Policies of requests cancelled since the last weight update: a forward pass may still include those requests.
        self._cancelled: set[PolicyVersion] = set()
        self._update_lock = asyncio.Lock()
        self._recent = RecentSamples()
        self._manager: SeededManager | PlainManager
        if needs_plain_sampling(self.model.config):
            self._manager = PlainManager(self.model, self.max_model_len, self.cache_tokens)
        else:
            config = batching_config(self.model, self.max_model_len, self.cache_tokens)
            self._manager = SeededManager(self.model, config)

    def start(self) -> None:
        """Allocate the cache and start the engine thread; raises what the allocation raises."""
        loop = asyncio.get_running_loop()
        self._manager.on_end = lambda: loop.call_soon_threadsafe(self._fail_pending)
        self._manager.warmup()
        self._manager.start()

    async def stop(self) -> None:
        """End the engine thread; requests that still run fail."""
        await asyncio.to_thread(lambda: self._manager.stop(timeout=30, hard_stop=True))
        self._fail_pending()

    @property
    def version(self) -> int:
        """The policy version of new requests."""
        return self.policy.version

    @property
    def failure(self) -> BaseException | None:
        """The error that ended the engine thread; None while it runs."""
        return self._manager.failure

    def stats(self) -> dict[str, float]:
        """Return the counters and the current running, waiting, cache_used_tokens, cache_tokens and version."""
        used, size = self._manager.cache_tokens()
        return asdict(self.counters) | {
            "running": len(self._pending),
            "waiting": self.gate.waiting,
            "cache_used_tokens": used,
            "cache_tokens": size,
            "version": self.version,
        }

    async def sample(self, job: SamplingJob) -> Completion:
        """Sample one completion and add it to the log. Cancelling the call frees the request's slot.

        Raises:
            EngineFailedError: The engine has ended, or its output is not a probability distribution.
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
        self.completion_log.add(completion)
        self._recent.add(job.prompt, job.params, completion)
        return completion

    async def rescore(self) -> list[Rescored]:
        """Rescore some samples of the last two policies since the last call; empty if there are none.

        Sampling continues meanwhile; a weight update waits for it.
        """
        async with self._update_lock, self.gate.enter():
            scored: list[Rescored] = []
            for policy in (self._previous, self.policy):
                chosen = self._recent.pop(policy.version)
                scored += await asyncio.to_thread(self._rescore_by, policy, chosen)
            return scored

    async def self_check(self) -> float:
        """Sample a few tokens for two prompts in one batch, and rescore them one by one; neither counted nor logged.

        Returns:
            The larger mean absolute difference, nats per token. It is large for a model whose attention ignores the
            cache, or the padding of the shorter prompt.

        Raises:
            EngineFailedError: The model cannot be sampled from at all.
        """
        vocab, length = self.model.config.get_text_config().vocab_size, min(_SELF_CHECK_TOKENS, self.max_model_len) // 2
        prompts = [[(position + 1) * 7919 % vocab for position in range(n)] for n in (length, max(1, length // 3))]
        jobs = [
            SamplingJob(f"self-check-{n}", "", prompt, length, frozenset(), SamplingParams(0))
            for n, prompt in enumerate(prompts)
        ]
        with self._manager.pause():  # so that they are one batch
            running = [asyncio.ensure_future(self._submit(job, self.policy)) for job in jobs]
            await asyncio.sleep(0)
        sequences = []
        for job, output in zip(jobs, await asyncio.gather(*running), strict=True):
            sampled = tuple(output.generated_tokens), tuple(output.logprobs)
            sequence = SampledSequence("", self.version, job.params.temperature)
            sequence.add(job.prompt, Completion("", job.request_id, len(job.prompt), *sampled, self.version))
            sequences.append(sequence)
        scored = await asyncio.to_thread(self._rescore_by, self.policy, sequences)
        return max(
            statistics.fmean(abs(a - b) for a, b in zip(one.logprobs, one.recomputed, strict=True)) for one in scored
        )

    def _rescore_by(self, policy: PolicyVersion, chosen: Sequence[SampledSequence]) -> list[Rescored]:
        with use_adapter(policy.adapter):
            return rescore(self.model, chosen, one_by_one=isinstance(self._manager, PlainManager))

    async def _submit(self, job: SamplingJob, policy: PolicyVersion) -> GenerationOutput | PlainOutput:
        self._raise_failure()
        future = self._pending[job.request_id] = asyncio.get_running_loop().create_future()
        self._running[job.request_id] = policy
        self._manager.submit(job, policy, lambda output: future.done() or future.set_result(output))
        try:
            output = await future
        except asyncio.CancelledError:
            self._manager.discard(job.request_id)
            self._cancelled.add(policy)
            raise
        finally:
            self._pending.pop(job.request_id, None)
            self._running.pop(job.request_id, None)
        if output.error is not None:
            raise EngineFailedError(f"the engine failed on this request: {output.error}")
        if not all(map(math.isfinite, output.logprobs)):
            raise EngineFailedError("the model's output is not a distribution (NaN or infinite logits)")
        return output

    def _fail_pending(self) -> None:
        """Fail the pending requests after the engine thread has ended, since it will not answer them."""
        for future in self._pending.values():
            if not future.done():
                future.set_exception(EngineFailedError(f"the engine has failed: {self.failure}"))

    def _raise_failure(self) -> None:
        if self.failure is not None:
            raise EngineFailedError(f"the engine has failed: {self.failure}")

    async def update_weights(self, load: Callable[[Collection[str | None]], str | None], version: int) -> float:
        """Make an adapter the policy of new requests; running requests keep theirs.

        Args:
            load: Receives the names of the adapters in use, loads the new weights into another one and returns its
                name; None for the base.
            version: The trainer's version number.

        Returns:
            Seconds during which nothing was sampled.

        Raises:
            EngineFailedError: The engine has ended.
            Whatever `load` raises; the old policy then stays.
        """
        async with self._update_lock:
            self._raise_failure()
            in_use = {policy.adapter for policy in (self.policy, *self._running.values(), *self._cancelled)}
            self._cancelled.clear()
            policy, paused = await asyncio.to_thread(self._switch_policy, lambda: load(in_use), version)
            self._previous, self.policy = self.policy, policy
        return time.perf_counter() - paused

    async def replace_weights(self, change: Callable[[], None], version: int) -> float:
        """Wait for the running requests, then apply `change` to the weights that all policies share.

        Returns:
            Seconds from the end of the last old request until new ones may start.

        Raises:
            EngineFailedError: The engine has ended.
            Whatever `change` raises; the old version then stays.
        """
        async with self._update_lock, self.gate.close():
            await self._wait_idle()
            adapter = self.policy.adapter
            self.policy, paused = await asyncio.to_thread(self._switch_policy, lambda: change() or adapter, version)
            self._previous = self.policy
        return time.perf_counter() - paused

    def _switch_policy(self, change: Callable[[], str | None], version: int) -> tuple[PolicyVersion, float]:
        """Pause the engine and switch; returns the new policy and the time of the pause."""
        with self._manager.pause():
            paused = time.perf_counter()
            policy = PolicyVersion(self.policy.serial + 1, version, change())
            self._manager.set_newest(policy)
            if self.model.device.type == "cuda":
                torch.cuda.synchronize(self.model.device)  # the engine computes on another stream
        return policy, paused

    async def _wait_idle(self) -> None:
        """Wait until cancelled requests have left the engine thread too."""
        self._raise_failure()
        while self._manager.busy:
            await asyncio.sleep(0.001)
            self._raise_failure()
