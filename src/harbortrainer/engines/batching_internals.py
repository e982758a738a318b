"""All uses of transformers' private continuous batching API, parts of which the sampler overrides.

Written for transformers `WRITTEN_FOR`. `PRIVATE_APIS` lists what is used, also by `attention.paged`, and is checked on
import. Other modules import the private names from here.
"""

from harbortrainer.private_apis import PrivateApi, places_in

WRITTEN_FOR = "5.24"
_PRIVATE = "transformers.generation.continuous_batching"
_USED = {
    "transformers:AttentionInterface": "register(key, value)",
    "transformers:PreTrainedConfig": "_attn_implementation",
    f"{_PRIVATE}.continuous_api:ContinuousBatchingManager": (
        "__init__(model, generation_config, continuous_batching_config, ...); _create_batch_processor();"
        "_run_generation_loop(use_inference_mode); switch_to_cb_friendly_attn(model, auto_switch_to_flash);"
        "warmup(); start(); pause();"
        "stop(block, timeout, keep_for_next_session, hard_stop); is_running(); cancel_request(request_id);"
        "add_request(input_ids, request_id, max_new_tokens, streaming, record_timestamps, eos_token_id, ...);"
        "register_result_handler(request_id, callback); background_thread_status; batch_processor; cancel_queue;"
        "input_queue; logit_processor; output_router; continuous_batching_config"
    ),
    f"{_PRIVATE}.continuous_api:BackgroundThreadStatus": "fatal_error",
    f"{_PRIVATE}.continuous_api:OutputRouter": "_lock; result_handlers",
    f"{_PRIVATE}.continuous_api:ContinuousBatchProcessor": "cache; has_pending_requests(); model_runner; scheduler",
    f"{_PRIVATE}.continuous_api": "ProtoPretrainedModel",
    f"{_PRIVATE}.scheduler": "SCHEDULER_MAPPING",
    f"{_PRIVATE}.scheduler:FIFOScheduler": (
        "schedule_batch(token_budget, cache_budget); _infer_request_tokens(state, request_ids_to_remove_from_waiting);"
        "_process_candidates(candidates, token_budget, cache_budget, request_ids_to_remove_from_waiting);"
        "_get_waiting_candidates(); _try_to_meet_safety_margin(); finish_request(request_id); active_requests; cache;"
        "max_requests_per_batch; safety_margin; starved_requests; waiting_requests"
    ),
    f"{_PRIVATE}.cache": "group_layers_by_attn_type(config)",
    f"{_PRIVATE}.cache:PagedAttentionCache": (
        "cache_allocators; layer_to_allocator; max_batch_tokens; num_blocks; pool; use_prefix_sharing"
    ),
    f"{_PRIVATE}.cache_allocators": "SLIDING_ATTENTION",
    f"{_PRIVATE}.cache_allocators.cache_pool:CachePool": (
        "count_free_blocks(index); free_blocks(index, block_ids); num_free_sectors; try_to_free_sectors()"
    ),
    f"{_PRIVATE}.cache_allocators.cache_allocator": "compute_block_hash(parent_hash, tokens)",
    f"{_PRIVATE}.cache_allocators.cache_allocator:BlockLedger": "block_to_hash; cached_blocks; hash_to_block",
    f"{_PRIVATE}.cache_allocators.full_attention:FullAttentionCacheAllocator": (
        "block_physical_stride; block_table; blocks_per_sector; cache_dtype; cache_tensor; index; ledger; num_blocks;"
        "num_key_value_heads; tokens_per_page; get_cache_for_block_table(layer_idx);"
        "mark_complete_blocks(request_id, token_ids, new_new_blocks);"
        "update(key_states, value_states, layer_idx, read_index, write_index)"
    ),
    f"{_PRIVATE}.cb_logits_processors:ContinuousBatchingLogitsProcessorList": (
        "__init__(logits_processor, ...); check_kwargs(kwargs); fill_defaults(int32_tensor);"
        "prepare_tensor_args(requests_in_batch, arg_storage); tensors_required"
    ),
    f"{_PRIVATE}.model_runner:ModelRunner": (
        "__init__(logit_processor, cb_config, inputs_and_outputs, cache, do_sample, return_logprobs);"
        "compute_batch(model, batch_data); _sample(scores, output_ids); cache; cb_config; inputs_and_outputs;"
        "maybe_pad_inputs(num_q_tokens, max_kv_read, use_decode_fast_path); logit_processor"
    ),
    f"{_PRIVATE}.input_outputs:PagedAttentionArgs": "cache; logits_processor_args; write_index",
    f"{_PRIVATE}.input_outputs:ContinuousBatchingIOs": "compute_stream; requests_in_batch",
    f"{_PRIVATE}.requests:FutureRequestState": "complete_blocks; has_new_token; query_length; state",
    f"{_PRIVATE}.requests:GenerationOutput": "error; generated_tokens; logprobs",
    f"{_PRIVATE}.requests:RequestState": (
        "generated_tokens; initial_tokens; logit_processor_kwargs; position_offset; remaining_prefill_tokens;"
        "request_id; status"
    ),
    f"{_PRIVATE}.requests:RequestStatus": "DECODING; FINISHED; PREFILLING",
    f"{_PRIVATE}.utils": "stream_context(stream)",
}
PRIVATE_APIS = PrivateApi("transformers", WRITTEN_FOR, __name__, places_in(_USED))
PRIVATE_APIS.check()

# ruff: noqa: E402 (a missing name must be reported by the check, not by an import)
from transformers.generation.continuous_batching.cache import group_layers_by_attn_type
from transformers.generation.continuous_batching.cache_allocators import SLIDING_ATTENTION
from transformers.generation.continuous_batching.cache_allocators.cache_allocator import compute_block_hash
from transformers.generation.continuous_batching.cache_allocators.full_attention import FullAttentionCacheAllocator
from transformers.generation.continuous_batching.cb_logits_processors import ContinuousBatchingLogitsProcessorList
from transformers.generation.continuous_batching.continuous_api import (
    ContinuousBatchingManager,
    ContinuousBatchProcessor,
    ProtoPretrainedModel,
)
from transformers.generation.continuous_batching.input_outputs import ContinuousBatchingIOs
from transformers.generation.continuous_batching.model_runner import ModelRunner
from transformers.generation.continuous_batching.requests import (
    FutureRequestState,
    GenerationOutput,
    RequestState,
    RequestStatus,
)
from transformers.generation.continuous_batching.scheduler import SCHEDULER_MAPPING, FIFOScheduler
from transformers.generation.continuous_batching.utils import stream_context

__all__ = [
    "SCHEDULER_MAPPING",
    "SLIDING_ATTENTION",
    "ContinuousBatchProcessor",
    "ContinuousBatchingIOs",
    "ContinuousBatchingLogitsProcessorList",
    "ContinuousBatchingManager",
    "FIFOScheduler",
    "FullAttentionCacheAllocator",
    "FutureRequestState",
    "GenerationOutput",
    "ModelRunner",
    "ProtoPretrainedModel",
    "RequestState",
    "RequestStatus",
    "compute_block_hash",
    "group_layers_by_attn_type",
    "stream_context",
]
