"""Sampling with transformers' own `generate`, for models that continuous batching cannot sample.

Such models keep a state besides keys and values (linear attention, Mamba), or have an attention of their own. A batch
of requests is padded on the left and sampled to its end; requests that arrive meanwhile wait for the next batch, and no
prefix is shared. This is slower than continuous batching, and as exact: tokens are drawn by the same sampling step.

Contract: the same calls as `SeededManager`. One policy version samples a batch.
"""

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import cast

import torch
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
    StoppingCriteria,
    StoppingCriteriaList,
)

from harbortrainer.engines.local.sampler.sampling_params import PolicyVersion, SamplingJob, sample_tokens
from harbortrainer.engines.memory_parts import PlainLimits, is_out_of_memory
from harbortrainer.engines.peft_internals import use_adapter


@dataclass
class PlainOutput:
    """The result of a request, with the attributes of transformers' `GenerationOutput`."""

    generated_tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    error: str | None = None


@dataclass(eq=False)
class _Request:
    job: SamplingJob
    policy: PolicyVersion
    answer: Callable[[PlainOutput], object]
    output: PlainOutput = field(default_factory=PlainOutput)
    cancelled: bool = False

    @property
    def tokens(self) -> int:
        """Tokens that the request may have at its end."""
        return len(self.job.prompt) + self.job.max_tokens

    @property
    def ended(self) -> bool:
        done = self.output.generated_tokens
        return self.cancelled or len(done) >= self.job.max_tokens or bool(done and done[-1] in self.job.stop_ids)


class PlainManager:
    """Samples batches of requests in a thread of its own.

    Args:
        model: Loaded for sampling.
        max_model_len: Tokens of the longest request.
        planned: Tokens of the cache according to a memory plan.

    Raises:
        UserError: The cache of one request does not fit.

    Attributes:
        on_end: Called on the thread when it ends, for any reason.
    """

    def __init__(self, model: PreTrainedModel, max_model_len: int, planned: int | None) -> None:
        self._model, self._limits = model, PlainLimits.for_model(model, max_model_len, planned)
        self._cache_tokens = self._limits.cache_bytes // self._limits.cache.token(max_model_len)
        self._changed = threading.Condition()
        self._waiting: deque[_Request] = deque()
        self._batch: list[_Request] = []
        self._pauses, self._at_rest, self._ends = 0, True, False
        self._thread = threading.Thread(target=self._run, name="sampler", daemon=True)
        self._failure: BaseException | None = None
        self.on_end: Callable[[], object] = lambda: None

    def warmup(self) -> None:
        """Do nothing: no cache is allocated before it is needed."""

    def start(self) -> None:
        """Start the thread. `generate` would apply the model's own defaults, such as a repetition penalty."""
        self._model.generation_config = GenerationConfig()
        self._thread.start()

    def stop(self, *, timeout: float, hard_stop: bool) -> None:
        """End the thread after its current forward pass; requests get no answer."""
        with self._changed:
            self._ends = True
            self._changed.notify_all()
        if self._thread.ident is not None:
            self._thread.join(timeout)

    def submit(self, job: SamplingJob, policy: PolicyVersion, on_result: Callable[[PlainOutput], object]) -> None:
        """Add a request. `on_result` is called on the running event loop once it has ended or failed."""
        loop = asyncio.get_running_loop()
        with self._changed:
            request = _Request(job, policy, lambda output: loop.call_soon_threadsafe(on_result, output))
            self._waiting.append(request)
            self._changed.notify_all()

    def discard(self, request_id: str) -> None:
        """Cancel a request and drop its result."""
        with self._changed:
            for request in [*self._waiting, *self._batch]:
                request.cancelled |= request.job.request_id == request_id

    @property
    def failure(self) -> BaseException | None:
        """The error that ended the thread; None while it runs."""
        if self._failure is not None:
            return self._failure
        return None if self._thread.is_alive() else RuntimeError("the engine thread is not running")

    @property
    def busy(self) -> bool:
        """Whether there is a running or waiting request, cancelled ones included."""
        with self._changed:
            return bool(self._batch or self._waiting)

    def cache_tokens(self) -> tuple[int, int]:
        """Return the tokens of the running requests, and the most that a batch of the longest ones may have."""
        with self._changed:
            used = sum(len(one.job.prompt) + len(one.output.generated_tokens) for one in self._batch)
        return used, self._cache_tokens

    def set_newest(self, policy: PolicyVersion) -> None:
        """Do nothing: a batch has the policy of its requests."""

    @contextmanager
    def pause(self) -> Generator[None]:
        """Wait for the running forward pass; none starts until the block ends."""
        with self._changed:
            self._pauses += 1
            self._changed.wait_for(lambda: self._at_rest or not self._thread.is_alive())
        try:
            yield
        finally:
            with self._changed:
                self._pauses -= 1
                self._changed.notify_all()

    def rest(self) -> None:
        """Called by the thread between forward passes: wait while paused."""
        with self._changed:
            self._at_rest = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._pauses or self._ends)
            self._at_rest = False

    def ends(self, requests: list[_Request]) -> list[bool]:
        """Return which requests of the batch have ended; all of them if the thread shall end."""
        with self._changed:
            return [self._ends or request.ended for request in requests]

    def _run(self) -> None:
        try:
            while batch := self._next_batch():
                self._sample(batch)
                with self._changed:
                    self._batch = []
                    self._changed.notify_all()
        except Exception as error:  # noqa: BLE001 - `failure` reports it to every request
            self._failure = error
        finally:
            with self._changed:
                self._at_rest = True
                self._changed.notify_all()
            self.on_end()

    def _next_batch(self) -> list[_Request]:
        """Wait for a request, and return it with others of its policy that fit. Empty after `stop`."""
        with self._changed:
            self._at_rest = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._ends or (self._waiting and not self._pauses))
            self._at_rest = False
            if self._ends:
                return []
            first = self._waiting.popleft()
            batch, kept = [first], deque[_Request]()
            for request in self._waiting:
                wider = [*batch, request]
                prompt, total = max(len(one.job.prompt) for one in wider), max(one.tokens for one in wider)
                if request.policy == first.policy and self._limits.fits(len(wider), prompt, total):
                    batch = wider
                else:
                    kept.append(request)
            self._waiting, self._batch = kept, batch
            return batch

    def _sample(self, batch: list[_Request]) -> None:
        """Sample a batch and answer its requests; in two halves if the memory is not enough."""
        running = [request for request in batch if not request.cancelled]
        try:
            if running:
                self._generate(running)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            if len(running) == 1:
                running[0].output.error = "out of memory"
                running[0].answer(running[0].output)
                return
            for request in running:
                request.output = PlainOutput()  # a seed and a position give the same token again
            half = len(running) // 2
            self._sample(running[:half])
            self._sample(running[half:])

    def _generate(self, running: list[_Request]) -> None:
        width = max(len(request.job.prompt) for request in running)
        padding = [width - len(request.job.prompt) for request in running]
        device = self._model.device
        ids = [[0] * pad + list(one.job.prompt) for pad, one in zip(padding, running, strict=True)]
        mask = [[0] * pad + [1] * (width - pad) for pad in padding]
        longest = max(request.job.max_tokens for request in running)
        with use_adapter(running[0].policy.adapter):
            cast("Callable[..., object]", self._model.generate)(
                torch.tensor(ids, device=device),
                attention_mask=torch.tensor(mask, device=device),
                generation_config=GenerationConfig(do_sample=False, max_new_tokens=longest, pad_token_id=0),
                logits_processor=LogitsProcessorList([_Draw(running, device)]),
                stopping_criteria=StoppingCriteriaList([_Ends(self, running)]),
            )
        for request in running:
            if not self._ends:
                request.answer(request.output)


class _Draw(LogitsProcessor):
    """Draws each request's next token, records it, and leaves `generate` no other choice."""

    def __init__(self, requests: list[_Request], device: torch.device) -> None:
        self._requests, self._device = requests, device
        params = [request.job.params for request in requests]
        rows = [(p.temperature, p.top_k, p.top_p, p.min_p) for p in params]
        columns = torch.tensor(rows, dtype=torch.float32, device=device).unbind(1)
        self._temperature, *truncation = columns
        self._truncation = (truncation[0], truncation[1], truncation[2]) if any(p.truncates for p in params) else None

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        uniform = torch.tensor(
            [one.job.params.uniform(len(one.job.prompt) + len(one.output.generated_tokens)) for one in self._requests],
            device=self._device,
        )
        tokens, logprobs = sample_tokens(scores.float(), uniform, self._temperature, self._truncation)
        for request, token, logprob in zip(self._requests, tokens.tolist(), logprobs.tolist(), strict=True):
            if not request.ended:
                request.output.generated_tokens.append(token)
                request.output.logprobs.append(logprob)
        chosen = torch.full_like(scores, -torch.inf)
        return chosen.scatter_(1, tokens[:, None], 0.0)  # ty: ignore[invalid-explicit-return]


class _Ends(StoppingCriteria):
    """Ends the requests that have all their tokens, and lets a weight update in between two forward passes."""

    def __init__(self, manager: PlainManager, requests: list[_Request]) -> None:
        self._manager, self._requests = manager, requests

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor, **kwargs: object) -> torch.BoolTensor:
        self._manager.rest()
        return torch.tensor(self._manager.ends(self._requests), device=input_ids.device)  # ty: ignore[invalid-explicit-return]
