"""Models of other makers' kinds: what is sampled is what a plain forward pass says, or the kind is refused by name."""

from typing import Any

import pytest
import torch
from sampler_setup import PROMPT, Reference, agrees, generate
from tiny_model import build_tiny_tokenizer
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from harbortrainer.config.trainer_table import LoraSettings
from harbortrainer.engines.local.learner.lora_policy import LoraPolicy
from harbortrainer.engines.local.sampler import Sampler
from harbortrainer.engines.memory_plan import plan_memory
from harbortrainer.errors import UserError

SMALL: dict[str, Any] = {
    "vocab_size": 320, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4,
    "max_position_embeddings": 512, "bos_token_id": None, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
GROUPED: dict[str, Any] = {"num_key_value_heads": 2, "head_dim": 16}
EXPERTS: dict[str, Any] = {"num_local_experts": 4, "num_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2}
COMPRESSED: dict[str, Any] = {
    "kv_lora_rank": 16,
    "q_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
}
SAMPLED: dict[str, dict[str, Any]] = {
    "llama": GROUPED,
    "qwen2": {"num_key_value_heads": 2},
    "qwen3_moe": {**GROUPED, **EXPERTS, "moe_intermediate_size": 32},
    "mistral": {**GROUPED, "sliding_window": 8},
    "gemma3_text": {**GROUPED, "sliding_window": 8},
    "phi3": {"num_key_value_heads": 2},
    "smollm3": {"num_key_value_heads": 2},
    "olmo3": {"num_key_value_heads": 2, "sliding_window": 8},
    "glm4": GROUPED,
}
REFUSED = {
    "qwen3_5_text": "Qwen3_5ForCausalLM has layers of linear_attention; only full and sliding attention is batched",
    "gpt_oss": "GptOssForCausalLM has an attention of its own, which cannot be batched",
    "gemma2": "Gemma2ForCausalLM has an attention of its own, which cannot be batched",
    "deepseek_v3": "DeepseekV3ForCausalLM has values of another width than its keys, which are not batched",
    "mamba": "MambaForCausalLM has layers of linear_attention; only full and sliding attention is batched",
}


def model(folder, kind, **settings):
    """A random model of a kind that transformers knows, in `folder`."""
    torch.manual_seed(0)
    made = AutoModelForCausalLM.from_config(CONFIG_MAPPING[kind](**SMALL, **settings))
    made.save_pretrained(folder)
    build_tiny_tokenizer().save_pretrained(folder)
    return folder


@pytest.mark.parametrize("kind", SAMPLED)
def test_what_is_sampled_is_what_a_plain_forward_pass_says(tmp_path, kind):
    folder = model(tmp_path, kind, **SAMPLED[kind])
    plain = Reference(folder)
    with Sampler(folder, max_model_len=256) as sampler:
        first = generate(sampler.url, PROMPT, max_tokens=20, ignore_eos=True)
        turn = [*PROMPT, *first["token_ids"], 5, 6, 7]
        assert agrees(first, plain)
        assert agrees(generate(sampler.url, turn, max_tokens=20, ignore_eos=True), plain, turn)


@pytest.mark.parametrize("kind", REFUSED)
def test_a_kind_that_cannot_be_batched_is_refused_by_name_before_a_weight_is_loaded(tmp_path, kind):
    more = COMPRESSED | EXPERTS if kind == "deepseek_v3" else {}
    CONFIG_MAPPING[kind](**SMALL, **more).save_pretrained(tmp_path)
    build_tiny_tokenizer().save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").touch()  # whoever reads it says that it is broken
    do = 'train it on Prime-RL, or set engine = "vllm" in [inference] on a machine with a GPU'
    said = f"the embedded engine cannot sample from {tmp_path}: {REFUSED[kind]}; {do}"
    with pytest.raises(UserError) as refused:
        Sampler(tmp_path, max_model_len=256).start()
    assert str(refused.value) == said
    with pytest.raises(UserError) as refused:
        plan_memory(tmp_path, LoraSettings(), kind="cpu", room=2**33)
    assert str(refused.value) == f"model.name: {said}"


def test_a_kind_that_does_not_ask_for_the_cache_is_seen_before_anything_is_sampled(tmp_path):
    sampler = Sampler(model(tmp_path, "nemotron", num_key_value_heads=2), max_model_len=256)
    with pytest.raises(
        UserError, match=r"token by token it says something else than of the whole \(0\.\d\d nats apart"
    ):
        sampler.start()
    sampler.stop()


def test_trying_a_model_is_counted_nowhere(tmp_path):
    with Sampler(model(tmp_path, "llama", **GROUPED), max_model_len=256) as sampler:
        counted = {name: value for name, value in sampler.stats().items() if name != "cache_tokens"}
        assert not any(counted.values()) and sampler.score_again() == []


@pytest.mark.parametrize("names", [["q_proj", "gate_proj", "up_proj", "down_proj"], ["gate_proj"]])
def test_names_that_peft_takes_for_stacked_experts_are_refused(tmp_path, names):
    model(tmp_path, "glm4_moe", **GROUPED, **EXPERTS, moe_intermediate_size=32, n_group=1, topk_group=1)
    base = AutoModelForCausalLM.from_pretrained(tmp_path)
    with pytest.raises(UserError, match="peft adapts this model's stacked experts in place of layers of these names"):
        LoraPolicy(base, LoraSettings(rank=2, target_modules=names), device=torch.device("cpu"), seed=0)
