"""The planned memory of forward and backward passes, compared with torch's allocations."""

from pathlib import Path
from typing import Any

import pytest
import torch
from model_kinds import small_config, small_model
from torch.profiler import ProfilerActivity, profile
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config, Qwen3MoeConfig

from harbortrainer.config.trainer_table import LoraSettings
from harbortrainer.engines.attention.paged import RAGGED_ATTENTION
from harbortrainer.engines.fake_forward import PROBE, FusedAttention, count_prompt, measure_prompt
from harbortrainer.engines.local.learner.micro_batch import pack
from harbortrainer.engines.local.learner.policies import LoraPolicy
from harbortrainer.engines.local.learner.training_sample import Sample
from harbortrainer.engines.local.sampler.sampling_params import LOGITS_AT_ONCE, sample_tokens
from harbortrainer.engines.memory_count import plan_memory
from harbortrainer.engines.memory_parts import ForwardPass, measure_plain_cache


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
    rows = 3 * LOGITS_AT_ONCE["cpu"] // vocab
    logits, ones = torch.randn(rows, vocab), torch.ones(rows)
    model = AutoModelForCausalLM.from_config(qwen(vocab_size=vocab))
    with torch.inference_mode():
        measured = peak(
            lambda: sample_tokens(logits, ones / 2, ones, (ones * 5, ones, ones * 0) if truncates else None)
        )
    assert min_bytes_per_logit * LOGITS_AT_ONCE["cpu"] < measured <= ForwardPass.for_model(model, "cpu").sampling


LORA = LoraSettings(rank=4, alpha=8)
PLAIN = ["qwen3_5", "mamba", pytest.param("rwkv", marks=pytest.mark.long), "gemma2", "gpt_oss", "nemotron_h"]
"""Linear attention, Mamba, RWKV, plain attention twice (gpt-oss with sinks), and Mamba 2 with attention."""


@pytest.mark.parametrize("kind", PLAIN)
def test_memory_of_prompts_is_close_to_count(kind):
    model = AutoModelForCausalLM.from_config(small_config(kind)).eval()
    counted, cache = count_prompt(model), measure_plain_cache(model)
    for rows, tokens in [(2, PROBE), (3, 500)]:
        ids = torch.arange(rows * tokens).view(rows, tokens) % 300
        mask = (torch.arange(tokens) > 2).long().expand(rows, -1)
        inputs: dict[str, Any] = {"input_ids": ids, "attention_mask": mask, "use_cache": True, "logits_to_keep": 1}
        with torch.inference_mode():
            measured = peak(lambda inputs=inputs: model(**inputs))
        kept = rows * (cache.per_request + tokens * cache.per_token)
        assert 0.95 * measured < counted.batch(rows, tokens) + kept < 1.15 * measured


@pytest.mark.parametrize("kind", ["qwen3_5", "mamba", "gemma2"])
def test_real_and_fake_forward_passes_allocate_the_same(kind):
    model = AutoModelForCausalLM.from_config(small_config(kind)).eval()
    layers = len(model.get_decoder().layers)
    counted, measured = count_prompt(model), measure_prompt(model)
    assert counted.batch(4, 500) == pytest.approx(measured.batch(4, 500), rel=0.01)
    assert counted.per_cached_token == pytest.approx(measured.per_cached_token, rel=0.02)
    assert len(model.get_decoder().layers) == layers == 4


def test_narrow_values_need_no_scores_on_a_gpu():
    model = AutoModelForCausalLM.from_config(small_config("deepseek_v3")).eval()
    on_cpu = count_prompt(model)
    with FusedAttention():
        on_gpu = count_prompt(model)
    assert max(pairs for _, pairs in on_gpu.moments) <= 5 < 4 * 8 < max(pairs for _, pairs in on_cpu.moments)


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize(
    "kind",
    ["qwen3_5", "gemma2", "gpt_oss"],  # the profiler's events of a Mamba model's training take gigabytes
)
def test_training_memory_is_within_plan(tmp_path: Path, kind, checkpointing):
    folder, device_type = small_model(tmp_path, kind), "cuda" if checkpointing else "cpu"
    plan = plan_memory(folder, LORA, device_type=device_type, capacity=2**33, dtype="float32")
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    policy = LoraPolicy(base, LORA, device=torch.device("cpu"), seed=0, checkpointing=checkpointing)
    for tokens in (256, 500):
        sample = Sample([5] * tokens, [t > 0 for t in range(tokens)], [0.0] * tokens, [0] * tokens, 1.0, 1.0)
        (batch,) = pack([sample], 1000, torch.device("cpu"))
        measured = peak(lambda batch=batch: policy.logprobs(batch, training=True)[0].sum().backward())
        assert measured / 1.05 < plan.learner(tokens) < 2 * measured
