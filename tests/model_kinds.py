"""Tiny random models of transformers' architectures, by `model_type`."""

import inspect
from pathlib import Path
from typing import Any

import torch
from tiny_model import build_tiny_tokenizer
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PretrainedConfig

TOKENS: dict[str, Any] = {"bos_token_id": None, "eos_token_id": 2, "pad_token_id": 0}
SMALL: dict[str, Any] = {
    "vocab_size": 320, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512,
    # experts
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "moe_num_experts": 4, "num_experts_per_tok": 2,
    "moe_k": 2, "moe_intermediate_size": 32, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
    "n_shared_experts": 1, "shared_expert_intermediate_size": 32,
    # compressed keys and values
    "q_lora_rank": 32, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16,
    # layers with a state
    "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    "mamba_n_heads": 4, "mamba_d_head": "auto", "mamba_n_groups": 1, "mamba_d_state": 16, "mamba_d_ssm": 64,
    "mamba_num_heads": 8, "mamba_head_dim": 16, "ssm_state_size": 16, "n_groups": 1, "mamba_expand": 2,
    "state_size": 16,
}  # fmt: skip
"""Settings for every architecture whose config has them."""
OWN: dict[str, dict[str, Any]] = {
    "gpt2": {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 512},
    "bloom": {"n_head": 4, "n_layer": 2},
    "mamba2": {"num_heads": 8},
    "opt": {"ffn_dim": 96, "word_embed_proj_dim": 64},
    # by default these have no attention, and transformers refuses that
    "bamba": {"attn_layer_indices": [1, 3]},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"] * 2},
    "kimi_linear": {"layer_types": ["linear_attention", "full_attention"] * 2},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},  # by default all layers would be attention
    "gemma3n": {
        "laurel_rank": 8, "vocab_size_per_layer_input": 320, "hidden_size_per_layer_input": 16,
        "num_kv_shared_layers": 0, "layer_types": ["sliding_attention", "full_attention"] * 2,
        "activation_sparsity_pattern": None,
    },
    "gemma4": {"vocab_size_per_layer_input": 320, "hidden_size_per_layer_input": 16, "global_head_dim": 32},
}  # fmt: skip
WINDOWED = "mistral ministral ministral3 gemma2 gemma3 gemma3n gemma4 gpt_oss olmo3 cohere2 exaone4"
"""Architectures that get a window shorter than the tests' prompts."""
NO_GROUPS = ("deepseek_v2", "deepseek_v3", "glm4_moe_lite", "kimi_linear", "dots1")


def small_config(kind: str, **changed: Any) -> PretrainedConfig:
    """Return a small config of an architecture; of a multimodal one, its text part."""
    made = CONFIG_MAPPING[f"{kind}_text" if f"{kind}_text" in CONFIG_MAPPING else kind]
    known = set(inspect.signature(made).parameters).union(*(inspect.get_annotations(base) for base in made.__mro__))
    settings = {name: value for name, value in SMALL.items() if name in known}
    if kind in WINDOWED.split():
        settings["sliding_window"] = 8
    if kind in NO_GROUPS:
        settings["num_key_value_heads"] = settings["num_attention_heads"]
    if kind in (*NO_GROUPS, "falcon"):
        settings.pop("head_dim", None)
    return made(**settings | OWN.get(kind, {}) | TOKENS | changed)


def small_model(folder: Path, kind: str) -> Path:
    """Save a small model with a tokenizer to `folder`."""
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(small_config(kind)).save_pretrained(folder)
    build_tiny_tokenizer().save_pretrained(folder)
    return folder


def unreadable_model(folder: Path, kind: str) -> Path:
    """Save a config and a tokenizer with an invalid weight file, so that reading the weights fails."""
    small_config(kind).save_pretrained(folder)
    build_tiny_tokenizer().save_pretrained(folder)
    (folder / "model.safetensors").touch()
    return folder
