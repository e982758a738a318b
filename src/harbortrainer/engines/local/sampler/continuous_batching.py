"""All that goes behind transformers' public surface: its continuous batching, bent to reinforcement learning's needs.

Bent are: the attention (each request only meets its own keys), the sampling step (a random number per request, see
`draw`), and the way parameters reach it. Scheduling, the paged cache, prefix sharing and the engine thread are
transformers' own. Written for transformers `WRITTEN_FOR`; `COUPLINGS` lists what is touched, and is checked before the
first use.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from transformers import (
    AttentionInterface,
    ContinuousBatchingConfig,
    GenerationConfig,
    LogitsProcessorList,
    PreTrainedModel,
)

from harbortrainer.couplings import Couplings, places_in
from harbortrainer.engines.local.sampler.draw import Draw, draw
from harbortrainer.engines.local.sampler.ragged_attention import RaggedPlan, attend, make_plan, whole_sequences

WRITTEN_FOR = "5.23"
_PRIVATE = "transformers.generation.continuous_batching"
_USED = {
    "transformers:AttentionInterface": "register(key, value)",
    "transformers:PreTrainedConfig": "_attn_implementation",
    f"{_PRIVATE}.continuous_api:ContinuousBatchingManager": (
        "__init__(model, generation_config, continuous_batching_config, ...); _create_batch_processor();"
        "_run_generation_loop(); switch_to_cb_friendly_attn(model, auto_switch_to_flash); warmup(); start();"
        "pause(); stop(block, timeout, keep_for_next_session, hard_stop); is_running(); cancel_request(request_id);"
        "add_request(input_ids, request_id, max_new_tokens, streaming, record_timestamps, eos_token_id, ...);"
        "register_result_handler(request_id, callback); background_thread_status; batch_processor; cancel_queue;"
        "input_queue; logit_processor; output_router; continuous_batching_config"
    ),
    f"{_PRIVATE}.continuous_api:BackgroundThreadStatus": "fatal_error",
    f"{_PRIVATE}.continuous_api:OutputRouter": "_lock; result_handlers",
    f"{_PRIVATE}.continuous_api:ContinuousBatchProcessor": "cache; has_pending_requests(); model_runner; scheduler",
    f"{_PRIVATE}.continuous_api": "ProtoPretrainedModel",
    f"{_PRIVATE}.scheduler:Scheduler": "active_requests",
    f"{_PRIVATE}.cache:PagedAttentionCache": "cache_allocators; layer_to_allocator; num_blocks; reset()",
    f"{_PRIVATE}.cache_allocators.full_attention:FullAttentionCacheAllocator": (
        "index; update(key_states, value_states, layer_idx, read_index, write_index);"
        "get_cache_for_block_table(layer_idx)"
    ),
    f"{_PRIVATE}.cb_logits_processors:ContinuousBatchingLogitsProcessorList": (
        "__init__(logits_processor, ...); check_kwargs(kwargs); fill_defaults(int32_tensor);"
        "prepare_tensor_args(requests_in_batch, arg_storage); tensors_required"
    ),
    f"{_PRIVATE}.model_runner:ModelRunner": (
        "__init__(logit_processor, cb_config, inputs_and_outputs, cache, do_sample, return_logprobs);"
        "compute_batch(model, batch_data); _sample(scores, output_ids);"
        "cache; cb_config; inputs_and_outputs; logit_processor"
    ),
    f"{_PRIVATE}.input_outputs:PagedAttentionArgs": (
        "cache; cu_seq_lens_k; cu_seq_lens_q; logits_processor_args; read_index; write_index"
    ),
    f"{_PRIVATE}.input_outputs:ContinuousBatchingIOs": "compute_stream",
    f"{_PRIVATE}.requests:FutureRequestState": "has_new_token; state",
    f"{_PRIVATE}.requests:GenerationOutput": "error; generated_tokens; logprobs",
    f"{_PRIVATE}.requests:RequestState": "logit_processor_kwargs; position_offset",
    f"{_PRIVATE}.utils": "stream_context(stream)",
}
COUPLINGS = Couplings("transformers", WRITTEN_FOR, __name__, places_in(_USED))
COUPLINGS.check()

# ruff: noqa: E402 (what is not there must not be imported before the check)
from transformers.generation.continuous_batching.cache import PagedAttentionCache
from transformers.generation.continuous_batching.cb_logits_processors import ContinuousBatchingLogitsProcessorList
from transformers.generation.continuous_batching.continuous_api import (
    ContinuousBatchingManager,
    ContinuousBatchProcessor,
    ProtoPretrainedModel,
)
from transformers.generation.continuous_batching.model_runner import ModelRunner
from transformers.generation.continuous_batching.requests import FutureRequestState, GenerationOutput
from transformers.generation.continuous_batching.utils import stream_context

# transformers builds no mask for a name it does not know.
RAGGED_ATTENTION = "ragged"
_ARGUMENTS = 5  # rows of `DrawArguments`


def _ragged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    cache: PagedAttentionCache | None = None,
    ragged_plan: RaggedPlan | None = None,
    write_index: Sequence[torch.Tensor] = (),
    scaling: float | None = None,
    **kwargs: object,
) -> tuple[torch.Tensor, None]:
    """An attention function of transformers': writes the new keys and values to the cache, then attends by the plan.

    Without a cache each sequence of the plan meets its own keys alone (`rescoring`); without a plan too, it is one.

    Args:
        query: [1, H, Q, D], all requests one after the other.
        key, value: [1, G, Q, D]; H is a multiple of G.

    Returns:
        [1, Q, H, D], and None for the weights.
    """
    if cache is None or ragged_plan is None:
        own = key[0].transpose(0, 1), value[0].transpose(0, 1)
        return attend(ragged_plan or whole_sequences([query.shape[2]]), query, own, own, scaling), None
    layer = cast("int", module.layer_idx)
    allocator = cache.layer_to_allocator[layer]
    read = allocator.update(
        key[0].transpose(0, 1), value[0].transpose(0, 1), layer, ragged_plan.read, write_index[allocator.index]
    )
    return attend(ragged_plan, query, read, allocator.get_cache_for_block_table(layer), scaling), None


AttentionInterface.register(RAGGED_ATTENTION, _ragged_attention)


class DrawArguments(ContinuousBatchingLogitsProcessorList):
    """Carries each request's `Draw` to the device, a row per parameter (transformers keeps all as int32 in
    one static tensor).

    Rows: uniform, temperature, top_k, top_p, min_p; all float32 seen as int32.
    """

    def __init__(self) -> None:
        # Nothing happens to the logits before the sampling step.
        super().__init__(LogitsProcessorList())
        self.tensors_required = _ARGUMENTS
        self.truncates = False

    def check_kwargs(self, kwargs: dict) -> None:
        if not isinstance(kwargs.get("draw"), Draw):
            raise TypeError("a request must carry its Draw")

    def fill_defaults(self, int32_tensor: torch.Tensor) -> None:
        int32_tensor.zero_()

    def prepare_tensor_args(
        self, requests_in_batch: list[FutureRequestState], arg_storage: torch.Tensor
    ) -> torch.Tensor:
        # `position_offset` was already moved on: it is the position of the token about to be drawn.
        drawing = [r.state for r in requests_in_batch if r.has_new_token]
        draws: list[Draw] = [state.logit_processor_kwargs["draw"] for state in drawing]
        self.truncates = any(d.truncates for d in draws)
        columns = [
            (d.uniform(state.position_offset), d.temperature, d.top_k, d.top_p, d.min_p)
            for d, state in zip(draws, drawing, strict=True)
        ]
        if columns:
            rows = torch.tensor(columns, dtype=torch.float32).T.contiguous().view(torch.int32)
            arg_storage[:_ARGUMENTS, : len(columns)] = rows.to(arg_storage.device)
        return arg_storage


@dataclass(frozen=True, slots=True)
class SamplingJob:
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


class SeededRunner(ModelRunner):
    """transformers' runner with our attention plan before the forward pass and our sampling step after it."""

    ragged = False  # whether the model attends by RAGGED_ATTENTION

    def compute_batch(self, model: torch.nn.Module, batch_data: dict) -> None:
        self._arguments = batch_data["logits_processor_args"]
        if self.ragged:
            (kind,) = self.cache.cache_allocators
            # Reading the lengths waits for the inputs; what is made of them belongs to the stream that computes.
            query_ends, key_ends = batch_data["cu_seq_lens_q"].tolist(), batch_data["cu_seq_lens_k"][kind].tolist()
            with stream_context(self.inputs_and_outputs.compute_stream):
                batch_data["ragged_plan"] = make_plan(
                    query_ends, key_ends, batch_data["read_index"][0], self.cb_config.page_size
                )
        super().compute_batch(model, batch_data)

    def _sample(self, scores: torch.Tensor, output_ids: torch.Tensor) -> None:
        count = scores.shape[1]
        uniform, temperature, *truncation = self._arguments[:_ARGUMENTS, :count].view(torch.float32)
        truncates = cast("DrawArguments", self.logit_processor).truncates
        tokens, logprobs = draw(scores[0], uniform, temperature, tuple(truncation) if truncates else None)
        output_ids[0, :count].copy_(tokens)
        output_ids[1, :count].copy_(logprobs.float().view(torch.int32))


class SeededManager(ContinuousBatchingManager):
    """transformers' manager with a `SeededRunner`.

    Attributes:
        on_end: Called on the engine thread when it ends, for whatever reason.
    """

    def __init__(self, model: PreTrainedModel, config: ContinuousBatchingConfig) -> None:
        self._ragged = model.config.get_text_config()._attn_implementation == RAGGED_ATTENTION
        never_ends = GenerationConfig(do_sample=True, eos_token_id=-1)
        super().__init__(cast("ProtoPretrainedModel", model), never_ends, config)
        self.logit_processor = DrawArguments()
        self.on_end: Callable[[], object] = lambda: None

    def submit(self, job: SamplingJob, on_result: Callable[[GenerationOutput], object]) -> None:
        """Adds a request; `on_result` is called on the running event loop when it ended or failed."""
        self.register_result_handler(job.request_id, on_result)
        self.add_request(
            list(job.prompt), request_id=job.request_id, max_new_tokens=job.max_tokens,
            eos_token_id=sorted(job.stop_ids), draw=job.draw,
        )  # fmt: skip

    def forget(self, request_id: str) -> None:
        """Cancels a request whose result nobody waits for."""
        self.cancel_request(request_id)
        with self.output_router._lock:
            self.output_router.result_handlers.pop(request_id, None)

    @property
    def failure(self) -> BaseException | None:
        """What ended the engine thread, None while it runs."""
        status = self.background_thread_status
        if status.fatal_error is not None:
            return status.fatal_error
        return None if self.is_running() else RuntimeError("the engine thread is not running")

    @property
    def busy(self) -> bool:
        """Whether the engine thread still has, or is still to learn of, a request."""
        pending = self.batch_processor is not None and self.batch_processor.has_pending_requests()
        return pending or not self.cancel_queue.empty() or not self.input_queue.empty()

    def cache_tokens(self) -> tuple[int, int]:
        """Tokens that running requests hold in the cache, and how many it can hold."""
        processor = self.batch_processor
        if processor is None:
            return 0, 0
        used = sum(state.position_offset for state in list(processor.scheduler.active_requests.values()))
        return used, processor.cache.num_blocks * self.continuous_batching_config.page_size

    def drop_prefix_cache(self) -> None:
        """Forgets all cached keys and values. Only while paused and without requests."""
        if self.batch_processor is not None:
            self.batch_processor.cache.reset()

    def _run_generation_loop(self) -> None:
        try:
            super()._run_generation_loop()
        finally:
            self.on_end()

    def switch_to_cb_friendly_attn(self, model: ProtoPretrainedModel, auto_switch_to_flash: bool = True) -> None:
        """The model comes with the attention it is to have (see `sampled_model`)."""

    def _create_batch_processor(self) -> ContinuousBatchProcessor:
        processor = super()._create_batch_processor()
        plain = processor.model_runner
        processor.model_runner = SeededRunner(
            plain.logit_processor, plain.cb_config, plain.inputs_and_outputs, plain.cache,
            do_sample=True, return_logprobs=True,
        )  # fmt: skip
        processor.model_runner.ragged = self._ragged
        return processor
