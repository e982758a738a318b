"""transformers' continuous batching, adapted to reinforcement learning.

Replaced parts:
    - the attention: each request attends to its own keys only (`attention.paged`);
    - the sampling step: one random number per request (`sampling_params.sample_tokens`);
    - the transport of sampling parameters to that step (`SamplingArguments`);
    - the admission of waiting requests (`sharing_scheduler`).

The paged cache, its prefix sharing and the engine thread are transformers' own.
"""

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import cast

import torch
from transformers import (
    ContinuousBatchingConfig,
    GenerationConfig,
    LogitsProcessorList,
    PreTrainedModel,
)

from harbortrainer.engines.attention.paged import RAGGED_ATTENTION
from harbortrainer.engines.attention.plan import Planner, Query
from harbortrainer.engines.batching_internals import (
    ContinuousBatchingIOs,
    ContinuousBatchingLogitsProcessorList,
    ContinuousBatchingManager,
    ContinuousBatchProcessor,
    FutureRequestState,
    GenerationOutput,
    ModelRunner,
    ProtoPretrainedModel,
    stream_context,
)
from harbortrainer.engines.local.sampler.sampling_params import (
    PolicyVersion,
    SamplingJob,
    SamplingParams,
    sample_tokens,
)
from harbortrainer.engines.local.sampler.sharing_scheduler import SharingScheduler
from harbortrainer.engines.peft_internals import use_adapter

_ARGUMENTS = 5  # rows of `SamplingArguments`


class SamplingArguments(ContinuousBatchingLogitsProcessorList):
    """Transfers the requests' `SamplingParams` to the device, one row per parameter.

    transformers keeps them in one static int32 tensor. Rows: uniform, temperature, top_k, top_p, min_p; float32 bits
    viewed as int32.
    """

    def __init__(self) -> None:
        # No processor changes the logits before the sampling step.
        super().__init__(LogitsProcessorList())
        self.tensors_required = _ARGUMENTS
        self.truncates = False

    def check_kwargs(self, kwargs: dict) -> None:
        if not isinstance(kwargs.get("sampling"), SamplingParams):
            raise TypeError("a request needs SamplingParams")

    def fill_defaults(self, int32_tensor: torch.Tensor) -> None:
        int32_tensor.zero_()

    def prepare_tensor_args(
        self, requests_in_batch: list[FutureRequestState], arg_storage: torch.Tensor
    ) -> torch.Tensor:
        # `position_offset` is already advanced: it is the position of the token to be sampled.
        states = [r.state for r in requests_in_batch if r.has_new_token]
        params: list[SamplingParams] = [state.logit_processor_kwargs["sampling"] for state in states]
        self.truncates = any(p.truncates for p in params)
        columns = [
            (p.uniform(state.position_offset), p.temperature, p.top_k, p.top_p, p.min_p)
            for p, state in zip(params, states, strict=True)
        ]
        if columns:
            rows = torch.tensor(columns, dtype=torch.float32).T.contiguous().view(torch.int32)
            arg_storage[:_ARGUMENTS, : len(columns)] = rows.to(arg_storage.device)
        return arg_storage


class SeededRunner(ModelRunner):
    """transformers' runner with our attention plan before the forward pass and our sampling step after it."""

    planner: Planner | None = None  # set if the model uses RAGGED_ATTENTION
    scheduler: SharingScheduler

    def maybe_pad_inputs(self, num_q_tokens: int, max_kv_read: int, use_decode_fast_path: bool) -> tuple[int, int]:
        # Our plan reads whole pages. Listing every row of every request, as transformers does, takes as long as the
        # attention itself.
        return num_q_tokens, 0 if self.planner else max_kv_read

    # Removes autograd's bookkeeping, which costs time in small operations even with gradients off.
    @torch.inference_mode()
    def compute_batch(self, model: torch.nn.Module, batch_data: dict) -> None:
        self._arguments = batch_data["logits_processor_args"]
        if self.planner is not None:
            batch_data["ragged_plan"] = self.planner.plan(self._queries())
            # Under the name `cache`, models would update it by themselves, and some in their own way.
            batch_data["paged_cache"] = batch_data.pop("cache")
        with use_adapter(self.scheduler.active_policy.adapter):
            super().compute_batch(model, batch_data)

    def _queries(self) -> list[Query]:
        io = cast("ContinuousBatchingIOs", self.inputs_and_outputs)
        pairs, table = ((r, r.state) for r in io.requests_in_batch), self.scheduler.allocator.block_table
        return [Query(r.query_length, state.position_offset, table[state.request_id]) for r, state in pairs]

    def _sample(self, scores: torch.Tensor, output_ids: torch.Tensor) -> None:
        count = scores.shape[1]
        uniform, temperature, *truncation = self._arguments[:_ARGUMENTS, :count].view(torch.float32)
        truncates = cast("SamplingArguments", self.logit_processor).truncates
        tokens, logprobs = sample_tokens(scores[0], uniform, temperature, tuple(truncation) if truncates else None)
        output_ids[0, :count].copy_(tokens)
        output_ids[1, :count].copy_(logprobs.float().view(torch.int32))


class SeededManager(ContinuousBatchingManager):
    """transformers' manager with a `SeededRunner`.

    Attributes:
        on_end: Called on the engine thread when that thread ends, for any reason.
    """

    def __init__(self, model: PreTrainedModel, config: ContinuousBatchingConfig) -> None:
        never_ends = GenerationConfig(do_sample=True, eos_token_id=-1)
        super().__init__(cast("ProtoPretrainedModel", model), never_ends, config)
        self.logit_processor = SamplingArguments()
        self.on_end: Callable[[], object] = lambda: None

    def submit(self, job: SamplingJob, policy: PolicyVersion, on_result: Callable[[GenerationOutput], object]) -> None:
        """Add a request. `on_result` is called on the running event loop once it has ended or failed."""
        self.register_result_handler(job.request_id, on_result)
        self.add_request(
            list(job.prompt), request_id=job.request_id, max_new_tokens=job.max_tokens,
            eos_token_id=sorted(job.stop_ids), sampling=job.params, policy=policy,
        )  # fmt: skip

    def discard(self, request_id: str) -> None:
        """Cancel a request and drop its result."""
        self.cancel_request(request_id)
        with self.output_router._lock:
            self.output_router.result_handlers.pop(request_id, None)

    @property
    def failure(self) -> BaseException | None:
        """The error that ended the engine thread; None while it runs."""
        status = self.background_thread_status
        if status.fatal_error is not None:
            return status.fatal_error
        return None if self.is_running() else RuntimeError("the engine thread is not running")

    @property
    def busy(self) -> bool:
        """Whether the engine thread has a running, queued or cancelled request to process."""
        pending = self.batch_processor is not None and self.batch_processor.has_pending_requests()
        return pending or not self.cancel_queue.empty() or not self.input_queue.empty()

    def cache_tokens(self) -> tuple[int, int]:
        """Return the tokens that running requests hold in the cache, and its capacity."""
        processor = self.batch_processor
        if processor is None:
            return 0, 0
        used = sum(state.position_offset for state in list(processor.scheduler.active_requests.values()))
        return used, processor.cache.num_blocks * self.continuous_batching_config.page_size

    def set_newest(self, policy: PolicyVersion) -> None:
        """Register the policy of new requests. Call only while paused."""
        if self.batch_processor is not None:
            cast("SharingScheduler", self.batch_processor.scheduler).set_newest(policy)

    def _run_generation_loop(self, use_inference_mode: bool) -> None:
        try:
            with self._on_compute_stream():
                super()._run_generation_loop(use_inference_mode)
        finally:
            self.on_end()

    @contextmanager
    def _on_compute_stream(self) -> Generator[None]:
        """Run the engine thread's GPU work on its compute stream.

        transformers prepares batches on the thread's default stream and does not synchronize with it. The learner uses
        that stream too, so its work may delay the batch's data.
        """
        processor = self.batch_processor
        stream = processor.inputs_and_outputs.compute_stream if processor is not None else None
        if stream is not None:
            stream.wait_stream(torch.cuda.current_stream(stream.device))
        with stream_context(stream):
            yield

    def switch_to_cb_friendly_attn(self, model: ProtoPretrainedModel, auto_switch_to_flash: bool = True) -> None:
        """Do nothing: the model already has its attention (see `sampled_model`)."""

    def _create_batch_processor(self) -> ContinuousBatchProcessor:
        processor = super()._create_batch_processor()
        plain = processor.model_runner
        processor.model_runner = SeededRunner(
            plain.logit_processor, plain.cb_config, plain.inputs_and_outputs, plain.cache,
            do_sample=True, return_logprobs=True,
        )  # fmt: skip
        processor.model_runner.scheduler = scheduler = cast("SharingScheduler", processor.scheduler)
        config = self.model.config.get_text_config()
        if config._attn_implementation == RAGGED_ATTENTION:
            allocator, page = scheduler.allocator, scheduler.allocator.tokens_per_page
            heads_per_kv = config.num_attention_heads // allocator.num_key_value_heads
            processor.model_runner.planner = planner = Planner(
                page, allocator.block_physical_stride // page, heads_per_kv,
                allocator.cache_tensor.device, allocator.cache_dtype,
            )  # fmt: skip
            scheduler.reads_prefixes_once = planner.reads_prefixes_once
        return processor
