"""transformers' continuous batching, bent to reinforcement learning's needs.

Bent are: the attention (each request only meets its own keys, see `ragged_attention`), the sampling step (a random
number per request, see `draw`), the way parameters reach it, and which of those that wait begin (`sharing_scheduler`).
The paged cache, the sharing of what is in it and the engine thread are transformers' own.
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

from harbortrainer.engines.batching_internals import (
    ContinuousBatchingIOs,
    ContinuousBatchingLogitsProcessorList,
    ContinuousBatchingManager,
    ContinuousBatchProcessor,
    FutureRequestState,
    GenerationOutput,
    ModelRunner,
    PagedAttentionArgs,
    ProtoPretrainedModel,
    stream_context,
)
from harbortrainer.engines.decode_graphs import DecodeGraphs
from harbortrainer.engines.local.sampler.draw import Draw, Policy, SamplingJob, draw
from harbortrainer.engines.local.sampler.sharing_scheduler import SharingScheduler
from harbortrainer.engines.peft_internals import sampling_with
from harbortrainer.engines.ragged_attention import RAGGED_ATTENTION
from harbortrainer.engines.ragged_plan import Asking, Planner

_ARGUMENTS = 5  # rows of `DrawArguments`


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


class SeededRunner(ModelRunner):
    """transformers' runner with our attention plan before the forward pass and our sampling step after it."""

    planner: Planner | None = None  # where the model attends by RAGGED_ATTENTION
    graphs: DecodeGraphs | None = None  # on a GPU, beside a planner
    scheduler: SharingScheduler

    def maybe_pad_inputs(self, num_q_tokens: int, max_kv_read: int, use_decode_fast_path: bool) -> tuple[int, int]:
        # Our plan reads pages: transformers need not list each request's every row, which took as long as to attend.
        return num_q_tokens, 0 if self.planner else max_kv_read

    # Spares each small operation what autograd notes even where it is off.
    @torch.inference_mode()
    def compute_batch(self, model: torch.nn.Module, batch_data: dict) -> None:
        with sampling_with(self.scheduler.turn.adapter):
            if self.planner is not None:
                asking = self._asking()
                if self.graphs is not None and self._play(self.graphs, model, batch_data, asking):
                    return
                batch_data["ragged_plan"] = self.planner.plan(asking)
            self._arguments = batch_data["logits_processor_args"]
            super().compute_batch(model, batch_data)

    def _asking(self) -> list[Asking]:
        io = cast("ContinuousBatchingIOs", self.inputs_and_outputs)
        pairs, table = ((r, r.state) for r in io.requests_in_batch), self.scheduler.allocator.block_table
        return [Asking(r.query_length, state.position_offset, table[state.request_id]) for r, state in pairs]

    def _play(self, graphs: DecodeGraphs, model: torch.nn.Module, batch_data: dict, asking: list[Asking]) -> bool:
        """Computes the batch by a graph; False where there is none for it."""
        carry_over, previous, output = self.inputs_and_outputs.get_cb_kwargs()
        way = self.scheduler.turn.adapter, cast("DrawArguments", self.logit_processor).truncates

        def forward(batch: dict, into: torch.Tensor) -> None:
            self._arguments = batch["logits_processor_args"]
            if self.supports_logits_to_keep(model):
                batch["logits_to_keep"] = batch["logits_indices"]
            self._forward_process_and_sample(model, batch, carry_over, previous, into)

        sampled = graphs.play(asking, cast("PagedAttentionArgs", batch_data), way, forward)
        if sampled is not None:
            output[:, : len(asking)].copy_(sampled)
        return sampled is not None

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
        never_ends = GenerationConfig(do_sample=True, eos_token_id=-1)
        super().__init__(cast("ProtoPretrainedModel", model), never_ends, config)
        self.logit_processor = DrawArguments()
        self.on_end: Callable[[], object] = lambda: None

    def submit(self, job: SamplingJob, policy: Policy, on_result: Callable[[GenerationOutput], object]) -> None:
        """Adds a request; `on_result` is called on the running event loop when it ended or failed."""
        self.register_result_handler(job.request_id, on_result)
        self.add_request(
            list(job.prompt), request_id=job.request_id, max_new_tokens=job.max_tokens,
            eos_token_id=sorted(job.stop_ids), draw=job.draw, policy=policy,
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

    @property
    def graph_passes(self) -> int:
        """Forward passes that CUDA graphs computed."""
        if self.batch_processor is None:
            return 0
        graphs = cast("SeededRunner", self.batch_processor.model_runner).graphs
        return graphs.played if graphs is not None else 0

    def begin(self, policy: Policy) -> None:
        """New requests may be the policy's from now on. Only while paused."""
        if self.batch_processor is not None:
            cast("SharingScheduler", self.batch_processor.scheduler).begin(policy)

    def _run_generation_loop(self) -> None:
        try:
            with self._on_its_stream():
                super()._run_generation_loop()
        finally:
            self.on_end()

    @contextmanager
    def _on_its_stream(self) -> Generator[None]:
        """On a GPU all that the engine thread does is on the stream that it computes on. transformers prepares a batch
        on the thread's stream and does not wait for that; it is the learner's too, whose work may stand before it."""
        processor = self.batch_processor
        stream = processor.inputs_and_outputs.compute_stream if processor is not None else None
        if stream is not None:
            stream.wait_stream(torch.cuda.current_stream(stream.device))
        with stream_context(stream):
            yield

    def switch_to_cb_friendly_attn(self, model: ProtoPretrainedModel, auto_switch_to_flash: bool = True) -> None:
        """The model comes with the attention it is to have (see `sampled_model`)."""

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
            kind, page = scheduler.allocator, scheduler.allocator.tokens_per_page
            processor.model_runner.planner = planner = Planner(
                page, kind.block_physical_stride // page, config.num_attention_heads // kind.num_key_value_heads,
                kind.cache_tensor.device, kind.cache_dtype,
            )  # fmt: skip
            scheduler.reads_once = planner.reads_once
            stream = processor.inputs_and_outputs.compute_stream
            if stream is not None:
                processor.model_runner.graphs = DecodeGraphs(planner, page, kind.write_trash_index, stream)
        return processor
