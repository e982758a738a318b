"""The engine: requests in, completions out, and the hand-over of weights between them.

Contract: lives on one event loop (the server's); transformers' engine thread does the work. A request ends in a
`Completion` or in `EngineFailedError`; none hangs when the engine thread dies. One completion = one policy version.
"""

import asyncio
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from transformers import PreTrainedModel
from transformers.generation.continuous_batching.requests import GenerationOutput

from harbortrainer.engines.local.sampler.batching import SeededManager
from harbortrainer.engines.local.sampler.capacity import batching_config
from harbortrainer.engines.local.sampler.gate import Gate
from harbortrainer.engines.local.sampler.ledger import Completion, Ledger
from harbortrainer.engines.local.sampler.sampling import Draw


class EngineFailedError(RuntimeError):
    """The engine could not finish a request, or is gone."""


@dataclass(frozen=True, slots=True)
class Job:
    """One sequence to sample.

    Attributes:
        prompt: Token ids, at least one.
        max_tokens: At least 1; prompt and completion fit the context (the caller saw to it).
        stop_ids: Tokens that end the completion, and are part of it.
    """

    request_id: str
    session_id: str
    prompt: Sequence[int]
    max_tokens: int
    stop_ids: frozenset[int]
    draw: Draw


@dataclass
class Counters:
    """What `/metrics` and `stats()` show. Seconds and tokens since the start."""

    requests: int = 0
    failed: int = 0
    cancelled: int = 0
    prompt_tokens: int = 0
    sampled_tokens: int = 0
    handovers: int = 0
    handover_s: float = 0.0
    handover_wait_s: float = 0.0
    handover_total_s: float = 0.0


@dataclass
class Engine:
    """Samples for the server.

    Attributes:
        model: Loaded for sampling (see `model.load_model`).
        max_model_len: Longest prompt plus completion.
        ledger: Where finished completions are entered.
        version: The policy version that samples now.
    """

    model: PreTrainedModel
    max_model_len: int
    ledger: Ledger
    version: int = 0
    counters: Counters = field(default_factory=Counters)

    def __post_init__(self) -> None:
        self.gate = Gate()
        self._pending: dict[str, asyncio.Future[GenerationOutput]] = {}
        self._swap_lock = asyncio.Lock()
        self._manager = SeededManager(self.model, batching_config(self.model, self.max_model_len))

    def start(self) -> None:
        """Allocates the cache and starts the engine thread; raises what the allocation raises."""
        loop = asyncio.get_running_loop()
        self._manager.on_end = lambda: loop.call_soon_threadsafe(self._fail_pending)
        self._manager.warmup()
        self._manager.start()

    async def stop(self) -> None:
        """Ends the engine thread; what is still running fails."""
        await asyncio.to_thread(self._manager.stop, True, 30, False, True)
        self._fail_pending()

    @property
    def failure(self) -> BaseException | None:
        return self._manager.failure

    @property
    def running(self) -> int:
        return len(self._pending)

    def cache_tokens(self) -> tuple[int, int]:
        """Tokens that running requests hold in the cache, and how many it can hold."""
        processor = self._manager.batch_processor
        if processor is None:
            return 0, 0
        used = sum(state.position_offset for state in list(processor.scheduler.active_requests.values()))
        return used, processor.cache.num_blocks * self._manager.continuous_batching_config.page_size

    async def sample(self, job: Job) -> Completion:
        """Samples one completion and enters it in the ledger. Cancelling the call frees the request's slot.

        Raises:
            EngineFailedError: the engine is gone, or produced something that is not a probability.
        """
        async with self.gate.enter():
            version = self.version
            try:
                output = await self._submit(job)
            except asyncio.CancelledError:
                self.counters.cancelled += 1
                raise
            except EngineFailedError:
                self.counters.failed += 1
                raise
            completion = Completion(
                job.session_id, job.request_id, len(job.prompt),
                tuple(output.generated_tokens), tuple(output.logprobs), version,
            )  # fmt: skip
        self.counters.requests += 1
        self.counters.prompt_tokens += completion.prompt_len
        self.counters.sampled_tokens += len(completion.token_ids)
        self.ledger.enter(completion)
        return completion

    async def _submit(self, job: Job) -> GenerationOutput:
        if self.failure is not None:
            raise EngineFailedError(f"the engine has failed: {self.failure}")
        future = asyncio.get_running_loop().create_future()
        self._pending[job.request_id] = future
        self._manager.register_result_handler(job.request_id, lambda out: future.done() or future.set_result(out))
        self._manager.add_request(
            list(job.prompt), request_id=job.request_id, max_new_tokens=job.max_tokens,
            eos_token_id=sorted(job.stop_ids), draw=job.draw,
        )  # fmt: skip
        try:
            output = await future
        except asyncio.CancelledError:
            self._forget(job.request_id)
            raise
        finally:
            self._pending.pop(job.request_id, None)
        if output.error is not None:
            raise EngineFailedError(f"the engine failed on this request: {output.error}")
        if not all(map(math.isfinite, output.logprobs)):
            raise EngineFailedError("the model's output is not a distribution (NaN or infinite logits)")
        return output

    def _forget(self, request_id: str) -> None:
        self._manager.cancel_request(request_id)
        router = self._manager.output_router
        with router._lock:
            router.result_handlers.pop(request_id, None)

    def _fail_pending(self) -> None:
        """Fails the waiting requests once the engine thread is gone: it answers nobody then."""
        for future in self._pending.values():
            if not future.done():
                future.set_exception(EngineFailedError(f"the engine has failed: {self.failure}"))

    async def swap(self, change: Callable[[], None], version: int) -> float:
        """Lets the running requests end, applies `change` to the weights, drops the prefix cache.

        Returns:
            Seconds between the end of the last old request and the moment new ones may start.

        Raises:
            EngineFailedError: the engine is gone.
            Whatever `change` raises; the old version then stays.
        """
        async with self._swap_lock:
            begin = time.perf_counter()
            try:
                await self.gate.shut("swap")
                await self._idle()
                idle = time.perf_counter()
                await asyncio.to_thread(self._apply, change)
                self.version = version
            finally:
                await self.gate.lift("swap")
            seconds = time.perf_counter() - idle
        counters = self.counters
        counters.handovers += 1
        counters.handover_s, counters.handover_wait_s = seconds, idle - begin
        counters.handover_total_s += seconds
        return seconds

    def _apply(self, change: Callable[[], None]) -> None:
        with self._manager.pause():
            change()
            self._manager.drop_prefix_cache()
            if self.model.device.type == "cuda":
                torch.cuda.synchronize(self.model.device)  # the engine computes on another stream

    async def _idle(self) -> None:
        """Waits until cancelled requests have left the engine thread as well."""
        while self._manager.busy:
            if self.failure is not None:
                break
            await asyncio.sleep(0.001)
        if self.failure is not None:
            raise EngineFailedError(f"the engine has failed: {self.failure}")
