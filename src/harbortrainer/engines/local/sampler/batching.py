"""The few places where transformers' continuous batching is bent to what reinforcement learning needs.

Bent are: the attention (each request only meets its own keys), the sampling step (a random number per request, see
`sampling`), and the way parameters reach it. Scheduling, the paged cache, prefix sharing and the engine thread are
transformers' own. Written against transformers 5.23; `tests/engines/test_sampler_batching.py` fails when a later
version no longer calls these hooks.
"""

from collections.abc import Callable
from typing import Any, cast

import torch
from transformers import ContinuousBatchingConfig, GenerationConfig, LogitsProcessorList, PreTrainedModel
from transformers.generation.continuous_batching.cb_logits_processors import ContinuousBatchingLogitsProcessorList
from transformers.generation.continuous_batching.continuous_api import (
    ContinuousBatchingManager,
    ContinuousBatchProcessor,
    ProtoPretrainedModel,
)
from transformers.generation.continuous_batching.input_outputs import ContinuousBatchingIOs
from transformers.generation.continuous_batching.model_runner import ModelRunner
from transformers.generation.continuous_batching.requests import FutureRequestState
from transformers.generation.continuous_batching.utils import stream_context

from harbortrainer.engines.local.sampler.attention import RAGGED_ATTENTION, make_plan
from harbortrainer.engines.local.sampler.sampling import Draw, draw

ARGUMENTS = 5  # rows of `DrawArguments`


class DrawArguments(ContinuousBatchingLogitsProcessorList):
    """Carries each request's `Draw` to the device, a row per parameter (transformers keeps all as int32 in
    one static tensor).

    Rows: uniform, temperature, top_k, top_p, min_p; all float32 seen as int32.
    """

    def __init__(self) -> None:
        # Nothing happens to the logits before the sampling step.
        super().__init__(LogitsProcessorList())
        self.tensors_required = ARGUMENTS
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
            arg_storage[:ARGUMENTS, : len(columns)] = rows.to(arg_storage.device)
        return arg_storage


class SeededRunner(ModelRunner):
    """transformers' runner with our attention plan before the forward pass and our sampling step after it."""

    ragged = False  # whether the model attends by RAGGED_ATTENTION

    def compute_batch(self, model: torch.nn.Module, batch_data: dict) -> None:
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
        logits = scores[0]
        io = self.inputs_and_outputs
        assert isinstance(io, ContinuousBatchingIOs) and isinstance(self.logit_processor, DrawArguments)
        arguments = io._bulk_input_tensor[io.static_inputs :, : logits.shape[0]].view(torch.float32)
        uniform, temperature, *truncation = arguments[:ARGUMENTS]
        tokens, logprobs = draw(
            logits, uniform, temperature, tuple(truncation) if self.logit_processor.truncates else None
        )
        output_ids[0, : tokens.shape[0]].copy_(tokens)
        output_ids[1, : tokens.shape[0]].copy_(logprobs.float().view(torch.int32))


class SeededManager(ContinuousBatchingManager):
    """transformers' manager with a `SeededRunner`.

    Attributes:
        on_end: Called on the engine thread when it ends, for whatever reason.
    """

    def __init__(self, model: PreTrainedModel, config: ContinuousBatchingConfig) -> None:
        self._ragged = model.config.get_text_config()._attn_implementation == RAGGED_ATTENTION
        super().__init__(cast("Any", model), GenerationConfig(do_sample=True, eos_token_id=-1), config)
        self.logit_processor = DrawArguments()
        self.on_end: Callable[[], object] = lambda: None

    def _run_generation_loop(self) -> None:
        try:
            super()._run_generation_loop()
        finally:
            self.on_end()

    def switch_to_cb_friendly_attn(self, model: ProtoPretrainedModel, auto_switch_to_flash: bool = True) -> None:
        """The model comes with the attention it is to have (see `model.load_model`)."""

    def _create_batch_processor(self) -> ContinuousBatchProcessor:
        processor = super()._create_batch_processor()
        plain = processor.model_runner
        processor.model_runner = SeededRunner(
            logit_processor=plain.logit_processor,
            cb_config=plain.cb_config,
            inputs_and_outputs=plain.inputs_and_outputs,
            cache=plain.cache,
            do_sample=True,
            return_logprobs=True,
        )
        processor.model_runner.ragged = self._ragged
        return processor

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

    def drop_prefix_cache(self) -> None:
        """Forgets all cached keys and values. Only while paused and without requests."""
        if self.batch_processor is not None:
            self.batch_processor.cache.reset()
