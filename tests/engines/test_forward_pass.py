"""The planned memory of the sampler's forward pass, compared with torch's allocations."""

from typing import Any

import pytest
import torch
from model_kinds import small_config
from torch.profiler import ProfilerActivity, profile
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config, Qwen3MoeConfig

from harbortrainer.engines.attention.paged import RAGGED_ATTENTION
from harbortrainer.engines.local.sampler.sampling_params import MAX_LOGITS_AT_ONCE, sample_tokens
from harbortrainer.engines.memory_parts import ForwardPass


def peak(compute) -> int:
    """Return the peak of additional bytes during `compute`, whose result is dropped."""
    compute()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        compute()
    results = recorded.profiler.kineto_results
    changes = sorted((e.start_ns(), e.nbytes()) for e in results.events() if e.name() == "[memory]")
    allocated = highest = 0
    for _, change in changes:
        allocated += change
        highest = max(highest, allocated)
    return highest


SHAPE: dict[str, Any] = {
    "hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 300,
}  # fmt: skip


def qwen(**changed: Any) -> Qwen3Config:
    return Qwen3Config(**{**SHAPE, **changed})


@pytest.mark.parametrize(
    "config",
    [
        qwen(),
        qwen(intermediate_size=64, num_attention_heads=8, num_key_value_heads=8),
        qwen(hidden_size=512),
        LlamaConfig(**SHAPE),
        Qwen3MoeConfig(**SHAPE, num_experts=8, num_experts_per_tok=4, moe_intermediate_size=128),
    ],
)
def test_layer_memory_is_close_to_plan(config):
    model = AutoModelForCausalLM.from_config(config, attn_implementation=RAGGED_ATTENTION).eval()
    ids = torch.arange(512)[None] % config.vocab_size
    with torch.inference_mode():
        measured = peak(lambda: model.get_decoder()(input_ids=ids, use_cache=False))
    planned = ForwardPass.for_model(model, "cpu").layer
    assert planned / 2 < measured <= planned


def test_counts_widest_layer():
    """Gemma 3n's config may have a number per layer."""
    layers = [[96, 96, 96, 480], [480] * 4, [96] * 4]
    models = [AutoModelForCausalLM.from_config(small_config("gemma3n", intermediate_size=sizes)) for sizes in layers]
    one_wide, all_wide, no_wide = (ForwardPass.for_model(model, "cpu").layer for model in models)
    assert one_wide == all_wide > no_wide


@pytest.mark.parametrize(("truncates", "min_bytes_per_logit"), [(False, 16), (True, 40)])
def test_sampling_memory_is_within_plan(truncates, min_bytes_per_logit):
    vocab = 2**15
    rows = 3 * MAX_LOGITS_AT_ONCE // vocab
    logits, ones = torch.randn(rows, vocab), torch.ones(rows)
    model = AutoModelForCausalLM.from_config(qwen(vocab_size=vocab))
    with torch.inference_mode():
        measured = peak(
            lambda: sample_tokens(logits, ones / 2, ones, (ones * 5, ones, ones * 0) if truncates else None)
        )
    assert min_bytes_per_logit * MAX_LOGITS_AT_ONCE < measured <= ForwardPass.for_model(model, "cpu").sampling
