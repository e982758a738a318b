"""What the sampler takes beside its keys and values: counted as transformers counts it, and planned for."""

from typing import Any

import pytest
import torch
from model_kinds import small_config, small_model
from pretend_gpu import GIB, pretend_gpu
from tiny_model import build_tiny_model
from torch.autograd.graph import saved_tensors_hooks
from transformers import AutoModelForCausalLM, Gemma3TextConfig

from harbortrainer.config.trainer_table import LoraSettings
from harbortrainer.engines.cache_size import batching_config, cache_bytes_per_token
from harbortrainer.engines.device_memory import room_for
from harbortrainer.engines.local.sampler import Sampler
from harbortrainer.engines.memory_count import MASKS, plan_memory
from harbortrainer.errors import UserError

CONTEXT, TOKENS = 256, 300
# Hugging Face's google/gemma-3-270m: few keys, many layers of two kinds.
GEMMA = Gemma3TextConfig(
    hidden_size=640, intermediate_size=2048, num_hidden_layers=18, num_attention_heads=4, num_key_value_heads=1,
    head_dim=256, vocab_size=262_144, max_position_embeddings=32_768, sliding_window=512,
)  # fmt: skip


@pytest.mark.parametrize("kind", ["qwen3", "mistral", "gemma3", "olmo3"])
def test_a_token_of_the_cache_is_counted_with_its_columns_of_the_masks(tmp_path, kind):
    with Sampler(small_model(tmp_path, kind), max_model_len=CONTEXT) as sampler:
        manager: Any = sampler._replies.engine._manager if sampler._replies else None
        processor, sizes = manager.batch_processor, manager.continuous_batching_config
        tokens = sizes.num_blocks * sizes.page_size
        inputs, most = processor.inputs_and_outputs, processor.cache.max_batch_tokens
        masks = (inputs.attention_mask or {}).values()
        taken = processor.cache.cache_tensor.nbytes
        # The rows' own columns are no token's of the cache, nor are the first two sectors.
        taken += sum(mask.nbytes - most * most * mask.itemsize for mask in masks) - 2 * processor.cache.bytes_per_sector
        assert bool(masks) == (kind != "qwen3")
        assert taken <= tokens * cache_bytes_per_token(sampler.model, "cpu") + processor.cache.bytes_per_sector


@pytest.mark.parametrize("card", [8, 24, 80])
@pytest.mark.parametrize("context", [8192, 32_768])
def test_what_transformers_counts_of_a_model_with_windows_has_room_on_a_card(tmp_path, card, context):
    """By hand: a pass of 1 024 tokens; two masks of two bytes; three of 18 layers attend to everything."""
    with pretend_gpu(card * GIB):
        model = AutoModelForCausalLM.from_config(small_config("gemma3")).to("cuda", torch.bfloat16)
        model.config = GEMMA
        sizes: Any = batching_config(model, context)
    tokens, spread = sizes.num_blocks * sizes.page_size, 18 // 3
    masks = 2 * 2 * sizes.max_batch_tokens * (spread * tokens + sizes.max_batch_tokens)
    read = spread * tokens * ((2 * 4 + 1) * 256 * 2 + 2 * 8)
    assert sizes.max_batch_tokens == 1024
    assert context <= tokens
    assert tokens * 2 * 18 * 256 * 2 + masks + read < 0.5 * card * GIB


def test_a_small_model_with_a_long_context_has_a_cache_that_transformers_lets_pass(tmp_path):
    """Its tokens are so small that what is counted beside them is most."""
    with pretend_gpu(4 * GIB), Sampler(build_tiny_model(tmp_path), max_model_len=1024) as sampler:
        assert sampler.stats()["cache_tokens"] >= 4 * 1024


def test_what_a_layer_keeps_of_its_mask_is_in_the_plan(tmp_path):
    folder = small_model(tmp_path, "gemma3")
    plan = plan_memory(folder, LoraSettings(), kind="cpu", room=GIB)
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="sdpa")
    kept: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.shape[-2:] == (TOKENS, TOKENS):
            kept[id(tensor.untyped_storage())] = tensor.untyped_storage()
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        model(input_ids=torch.zeros(1, TOKENS, dtype=torch.long), use_cache=False)
    assert sum(storage.nbytes() for storage in kept.values()) == (plan.pair - MASKS) * TOKENS**2
    assert plan.learner(TOKENS) > plan.pair * TOKENS**2
    assert plan.micro_batch(256, TOKENS) == TOKENS, "samples go one by one"


def test_with_activations_computed_again_one_layer_has_its_mask_at_a_time(tmp_path):
    plan = plan_memory(small_model(tmp_path, "gemma3"), LoraSettings(), kind="cuda", room=GIB)
    assert plan.pair == MASKS + 2
    other = plan_memory(build_tiny_model(tmp_path / "other"), LoraSettings(), kind="cuda", room=GIB)
    assert other.pair == 0


@pytest.mark.parametrize("error", [MemoryError("counted"), torch.OutOfMemoryError("CUDA out of memory")])
def test_no_memory_is_one_line_and_other_errors_are_themselves(error):
    with pytest.raises(UserError, match=r"^no memory for the cache; lower it$"), room_for("the cache", "lower it"):
        raise error
    with pytest.raises(RuntimeError, match="shapes"), room_for("the cache", "lower it"):
        raise RuntimeError("shapes do not match")
