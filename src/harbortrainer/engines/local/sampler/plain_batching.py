"""Sampling with transformers' own `generate`, for models that continuous batching cannot sample.

Such models keep a state besides keys and values (linear attention, Mamba), or have an attention of their own. A batch
of requests is padded on the left and sampled to its end; requests that arrive meanwhile wait for the next batch, and no
prefix is shared. This is slower than continuous batching, and as exact: tokens are drawn by the same sampling step.

`generate` feeds tokens to ended requests until the whole batch ends. So that none of them passes the model's context, a
batch ends where the longest of its rows would, and the other requests go on in a later batch.

Contract: the same calls as `SeededManager`. One policy version samples a batch. A request is answered as soon as it has
ended.
"""

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Generator
from contextlib import contextmanager, nullcontext
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

from harbortrainer.engines.fake_forward import measure_prompt
from harbortrainer.engines.local.sampler.sampling_params import PolicyVersion, SamplingJob, sample_tokens
from harbortrainer.engines.memory_parts import PlainLimits, is_out_of_memory
from harbortrainer.engines.peft_internals import use_adapter
from harbortrainer.private_apis import PrivateApi

PRIVATE_APIS = PrivateApi(
    library="transformers",
    written_for="5.24",
    used_by="harbortrainer.engines.local.sampler.plain_batching",
    places=("transformers.generation.utils:GenerationMixin._optimize_model_for_decode()",),
)


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
    answered: bool = False

    @property
    def tokens(self) -> list[int]:
        """Token ids of the prompt, and of the answer so far."""
        return [*self.job.prompt, *self.output.generated_tokens]

    @property
    def length(self) -> int:
        return len(self.job.prompt) + len(self.output.generated_tokens)

    @property
    def remaining(self) -> int:
        """Most tokens that are still to be sampled."""
        return self.job.max_tokens - len(self.output.generated_tokens)

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
        self._model = model
        self._limits = PlainLimits.for_model(model, measure_prompt(model), max_model_len, planned)
        self._max_model_len = max_model_len
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
        """Start the thread. `generate` would apply the model's own defaults, such as a repetition penalty.

        On a GPU it would also copy the weights of each request's experts, which the memory plan does not count.
        """
        PRIVATE_APIS.check()
        self._model.generation_config = GenerationConfig()
        setattr(self._model, "_optimize_model_for_decode", nullcontext)  # noqa: B010 - this object only, not its class
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

    def answer_ended(self, requests: list[_Request]) -> list[bool]:
        """Answer the requests that have ended, and return which have: all of them if the thread shall end."""
        with self._changed:
            if self._ends:
                return [True] * len(requests)
            for request in requests:
                if request.ended and not request.answered:
                    request.answered = True
                    request.answer(request.output)
            return [request.ended for request in requests]

    def _run(self) -> None:
        try:
            while batch := self._next_batch():
                unfinished = self._sample(batch)
                with self._changed:
                    self._waiting.extendleft(reversed(unfinished))
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
                width = max(one.length for one in wider)
                if request.policy == first.policy and self._limits.fits(len(wider), width, width + self._steps(wider)):
                    batch = wider
                else:
                    kept.append(request)
            self._waiting, self._batch = kept, batch
            return batch

    def _steps(self, batch: list[_Request]) -> int:
        """Return the most tokens that are sampled for a batch: none of its rows may pass the model's context."""
        room = self._max_model_len - max(request.length for request in batch)
        return min(max(request.remaining for request in batch), room)

    def _sample(self, batch: list[_Request]) -> list[_Request]:
        """Sample a batch, in two halves if the memory is not enough; returns the requests that have not ended."""
        running = [request for request in batch if not request.ended]
        if running and not self._try_generate(running):
            if len(running) > 1:
                half = len(running) // 2
                return [*self._sample(running[:half]), *self._sample(running[half:])]
            running[0].output.error = "out of memory"
            running[0].answered = True
            running[0].answer(running[0].output)
            return []
        return [request for request in running if not request.ended]

    def _try_generate(self, running: list[_Request]) -> bool:
        """Sample a batch; false if memory ran out. The error, whose traceback holds the cache, ends here."""
        try:
            self._generate(running)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            return False
        return True

    def _generate(self, running: list[_Request]) -> None:
        width = max(request.length for request in running)
        padding = [width - request.length for request in running]
        device = self._model.device
        ids = [[0] * pad + one.tokens for pad, one in zip(padding, running, strict=True)]
        mask = [[0] * pad + [1] * (width - pad) for pad in padding]
        steps = self._steps(running)
        with use_adapter(running[0].policy.adapter):
            cast("Callable[..., object]", self._model.generate)(
                torch.tensor(ids, device=device),
                attention_mask=torch.tensor(mask, device=device),
                generation_config=GenerationConfig(do_sample=False, max_new_tokens=steps, pad_token_id=0),
                logits_processor=LogitsProcessorList([_Draw(running, device)]),
                stopping_criteria=StoppingCriteriaList([_Ends(self, running)]),
            )


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
            [one.job.params.uniform(one.length) for one in self._requests],
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
    """Answers the requests that have ended, and lets a weight update in between two forward passes."""

    def __init__(self, manager: PlainManager, requests: list[_Request]) -> None:
        self._manager, self._requests = manager, requests

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor, **kwargs: object) -> torch.BoolTensor:
        self._manager.rest()
        return torch.tensor(self._manager.answer_ended(self._requests), device=input_ids.device)  # ty: ignore[invalid-explicit-return]
