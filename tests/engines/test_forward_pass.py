"""What the sampler's forward pass is said to take, against what torch allocates for one."""

from typing import Any

import pytest
import torch
from model_kinds import small_config
from torch.profiler import ProfilerActivity, profile
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config, Qwen3MoeConfig

from harbortrainer.engines.forward_pass import ForwardPass
from harbortrainer.engines.local.sampler.draw import DRAWN_ELEMENTS, draw
from harbortrainer.engines.ragged_attention import RAGGED_ATTENTION


def peak(compute) -> int:
    """The most bytes that were there at once, beside those from before; what `compute` returns is forgotten."""
    compute()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        compute()
    results = seen.profiler.kineto_results
    changes = sorted((e.start_ns(), e.nbytes()) for e in results.events() if e.name() == "[memory]")
    held = most = 0
    for _, change in changes:
        held += change
        most = max(most, held)
    return most


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
def test_a_layer_takes_no_more_than_is_planned_and_not_much_less(config):
    model = AutoModelForCausalLM.from_config(config, attn_implementation=RAGGED_ATTENTION).eval()
    ids = torch.arange(512)[None] % config.vocab_size
    with torch.inference_mode():
        measured = peak(lambda: model.get_decoder()(input_ids=ids, use_cache=False))
    planned = ForwardPass.of(model, "cpu").layer
    assert planned / 2 < measured <= planned


def test_of_layers_that_differ_the_widest_is_counted():
    """As Gemma 3n's config may have them, with a number for each layer."""
    layers = [[96, 96, 96, 480], [480] * 4, [96] * 4]
    models = [AutoModelForCausalLM.from_config(small_config("gemma3n", intermediate_size=sizes)) for sizes in layers]
    one, all_, none = (ForwardPass.of(model, "cpu").layer for model in models)
    assert one == all_ > none


@pytest.mark.parametrize(("truncates", "least"), [(False, 16), (True, 40)])
def test_drawing_takes_no_more_than_is_planned(truncates, least):
    vocab = 2**15
    rows = 3 * DRAWN_ELEMENTS // vocab
    logits, ones = torch.randn(rows, vocab), torch.ones(rows)
    model = AutoModelForCausalLM.from_config(qwen(vocab_size=vocab))
    with torch.inference_mode():
        measured = peak(lambda: draw(logits, ones / 2, ones, (ones * 5, ones, ones * 0) if truncates else None))
    assert least * DRAWN_ELEMENTS < measured <= ForwardPass.of(model, "cpu").drawn
