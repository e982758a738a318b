"""The cache's size: overheads counted as transformers does, and included in the memory plan."""

from typing import Any

import pytest
import torch
from model_kinds import small_config, small_model
from pretend_gpu import GIB, pretend_gpu
from tiny_model import build_tiny_model
from torch.autograd.graph import saved_tensors_hooks
from transformers import AutoModelForCausalLM, Gemma3TextConfig

from harbortrainer.config.trainer_table import LoraSettings
from harbortrainer.engines.local.sampler import Sampler
from harbortrainer.engines.memory_count import BOOLEAN_MASKS, plan_memory
from harbortrainer.engines.memory_parts import batching_config, cache_bytes_per_token, explain_out_of_memory
from harbortrainer.errors import UserError

CONTEXT, TOKENS = 256, 300
# Hugging Face's google/gemma-3-270m: few keys, many layers of two types.
GEMMA = Gemma3TextConfig(
    hidden_size=640, intermediate_size=2048, num_hidden_layers=18, num_attention_heads=4, num_key_value_heads=1,
    head_dim=256, vocab_size=262_144, max_position_embeddings=32_768, sliding_window=512,
)  # fmt: skip


@pytest.mark.parametrize("kind", ["qwen3", "mistral", "gemma3", "olmo3"])
def test_cached_token_includes_mask_columns(tmp_path, kind):
    with Sampler(small_model(tmp_path, kind), max_model_len=CONTEXT) as sampler:
        manager: Any = sampler._handler.engine._manager if sampler._handler else None
        processor, sizes = manager.batch_processor, manager.continuous_batching_config
        tokens = sizes.num_blocks * sizes.page_size
        inputs, batch_tokens = processor.inputs_and_outputs, processor.cache.max_batch_tokens
        masks = (inputs.attention_mask or {}).values()
        used = processor.cache.cache_tensor.nbytes
        # Columns of the batch's own tokens and the first two sectors do not belong to cached tokens.
        used += (
            sum(mask.nbytes - batch_tokens * batch_tokens * mask.itemsize for mask in masks)
            - 2 * processor.cache.bytes_per_sector
        )
        assert bool(masks) == (kind != "qwen3")
        assert used <= tokens * cache_bytes_per_token(sampler.model, "cpu") + processor.cache.bytes_per_sector


@pytest.mark.parametrize("card", [8, 24, 80])
@pytest.mark.parametrize("context", [8192, 32_768])
def test_windowed_model_fits_transformers_limit_on_gpu(tmp_path, card, context):
    """Expected by hand: a pass of 1 024 tokens, two masks of two bytes, full attention in three of 18 layers."""
    with pretend_gpu(card * GIB):
        model = AutoModelForCausalLM.from_config(small_config("gemma3")).to("cuda", torch.bfloat16)
        model.config = GEMMA
        sizes: Any = batching_config(model, context)
    tokens, layer_groups = sizes.num_blocks * sizes.page_size, 18 // 3
    masks = 2 * 2 * sizes.max_batch_tokens * (layer_groups * tokens + sizes.max_batch_tokens)
    read = layer_groups * tokens * ((2 * 4 + 1) * 256 * 2 + 2 * 8)
    assert sizes.max_batch_tokens == 1024
    assert context <= tokens
    assert tokens * 2 * 18 * 256 * 2 + masks + read < 0.5 * card * GIB


def test_long_context_cache_fits_transformers_limit(tmp_path):
    """The overhead per token exceeds its keys and values."""
    with pretend_gpu(4 * GIB), Sampler(build_tiny_model(tmp_path), max_model_len=1024) as sampler:
        assert sampler.stats()["cache_tokens"] >= 4 * 1024


def test_plan_includes_saved_masks(tmp_path):
    folder = small_model(tmp_path, "gemma3")
    plan = plan_memory(folder, LoraSettings(), device_type="cpu", capacity=GIB)
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="sdpa")
    saved: dict[int, torch.UntypedStorage] = {}

    def record_mask(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.shape[-2:] == (TOKENS, TOKENS):
            saved[id(tensor.untyped_storage())] = tensor.untyped_storage()
        return tensor

    with saved_tensors_hooks(record_mask, lambda tensor: tensor):
        model(input_ids=torch.zeros(1, TOKENS, dtype=torch.long), use_cache=False)
    assert sum(storage.nbytes() for storage in saved.values()) == (plan.mask_per_pair - BOOLEAN_MASKS) * TOKENS**2
    assert plan.learner(TOKENS) > plan.mask_per_pair * TOKENS**2
    assert plan.micro_batch(256, TOKENS) == TOKENS, "one sample per micro batch"


def test_activation_checkpointing_keeps_one_mask(tmp_path):
    plan = plan_memory(small_model(tmp_path, "gemma3"), LoraSettings(), device_type="cuda", capacity=GIB)
    assert plan.mask_per_pair == BOOLEAN_MASKS + 2
    other = plan_memory(build_tiny_model(tmp_path / "other"), LoraSettings(), device_type="cuda", capacity=GIB)
    assert other.mask_per_pair == 0


@pytest.mark.parametrize("error", [MemoryError("counted"), torch.OutOfMemoryError("CUDA out of memory")])
def test_out_of_memory_is_user_error_and_others_pass_through(error):
    with (
        pytest.raises(UserError, match=r"^not enough memory for the cache; lower it$"),
        explain_out_of_memory("the cache", "lower it"),
    ):
        raise error
    with pytest.raises(RuntimeError, match="shapes"), explain_out_of_memory("the cache", "lower it"):
        raise RuntimeError("shapes do not match")
