"""A fresh tiny policy: the Qwen3 architecture with random weights, and a tokenizer trained for its tasks."""

from collections.abc import Sequence

import torch
from renderers import Qwen3RendererConfig, create_renderer
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from harbortrainer.warmup.demonstrations import Demonstration
from harbortrainer.warmup.supervised import BasePolicy
from tiny_policy.tokenizer import train_tokenizer


def fresh_policy(episodes: Sequence[Demonstration], *, seed: int) -> BasePolicy:
    """A tiny model with random weights, and a tokenizer trained on `episodes`."""
    tokenizer = train_tokenizer(episodes)
    renderer = create_renderer(tokenizer, Qwen3RendererConfig(thinking_retention="all"))
    return BasePolicy(fresh_model(tokenizer, seed=seed), tokenizer, renderer)


def fresh_model(tokenizer: PreTrainedTokenizerFast, *, seed: int, max_length: int = 1024) -> Qwen3ForCausalLM:
    """About 0.7 million parameters: 3 layers, 128 wide, for `tokenizer`'s entries."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=max_length,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        tie_word_embeddings=True,
        initializer_range=0.05,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return Qwen3ForCausalLM(config)
