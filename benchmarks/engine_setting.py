"""The setting that both sides of `benchmarks/engine.py` share: a random model, prompts, and sizes."""

import argparse
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {
        "vocab_size": 800, "hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 3,
        "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 16,
    },
    "smollm2-135m": {
        "model_type": "llama", "vocab_size": 49_152, "hidden_size": 576, "intermediate_size": 1536,
        "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64,
    },
    "qwen3-0.6b": {
        "vocab_size": 151_936, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28,
        "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128,
    },
    "qwen3-1.7b": {
        "vocab_size": 151_936, "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28,
        "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128,
    },
    "qwen3-8b": {
        "vocab_size": 151_936, "hidden_size": 4096, "intermediate_size": 12_288, "num_hidden_layers": 36,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "tie_word_embeddings": False,
    },
}  # fmt: skip
RANK, ALPHA = 8, 16.0
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
SHARED = 1000
"""Tokens of a prompt that a group shares."""
TURNS, OBSERVED = 6, 60
"""Turns of a trial, and the observation tokens that each turn after the first adds to the prompt."""
LETTERS = [chr(c) for c in range(97, 123)]


@dataclass(frozen=True)
class Setting:
    """One comparison. `prompts` are texts whose letters are one token each."""

    folder: Path
    device: str
    dtype: str
    prompts: list[str]
    prompt_ids: list[list[int]]
    new: int
    group: int
    repeats: int

    @property
    def sampled(self) -> int:
        return self.new * len(self.prompts)


def build_model(folder: Path, arguments: argparse.Namespace) -> None:
    """Write the random model that the command line names, in the measured dtype."""
    layers = {} if arguments.layers is None else {"num_hidden_layers": arguments.layers}
    write_model(
        folder, arguments.model_shape, device=arguments.device, dtype=dtype_of(arguments),
        max_tokens=context_tokens(arguments), **layers,
    )  # fmt: skip


def write_model(folder: Path, shape: str, *, device: str, dtype: str, max_tokens: int, **changes: int) -> None:
    """Write a random model, Qwen3 if the shape names no other type, with a tokenizer that has one token per letter.

    Args:
        folder: The model's folder.
        shape: A key of `SHAPES`.
        device: Where the weights are drawn; a GPU draws those of a large model in seconds.
        dtype: Dtype of the weights.
        max_tokens: Longest sequence of the model.
        changes: Keys of the model's config that differ from the shape.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from tests.tiny_model import build_tiny_tokenizer

    tokenizer = build_tiny_tokenizer(259)
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"model_type": "qwen3", "tie_word_embeddings": True} | SHAPES[shape] | changes
    config = AutoConfig.for_model(
        **sizes,
        max_position_embeddings=max_tokens,
        bos_token_id=None,
        eos_token_id=tokenizer.convert_tokens_to_ids("<|im_end|>"),
        pad_token_id=tokenizer.convert_tokens_to_ids("<|endoftext|>"),
    )
    with torch.device(device):
        model: Any = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
    model.save_pretrained(folder, max_shard_size="2GB")  # a shard is copied in memory before it is written
    tokenizer.save_pretrained(folder)


def dtype_of(arguments: argparse.Namespace) -> str:
    return arguments.dtype or ("bfloat16" if arguments.device == "cuda" else "float32")


def context_tokens(arguments: argparse.Namespace) -> int:
    """Return the tokens of the longest context in the comparison, with space for the texts of TRL's template."""
    if arguments.only in ("steps", "memory"):
        return arguments.prompt + arguments.new + 64
    played = arguments.prompt + TURNS * (arguments.new + OBSERVED)
    return max(SHARED + arguments.new, played) + 64


def make_setting(folder: Path, arguments: argparse.Namespace) -> Setting:
    """Return the setting: prompts of one length, each repeated for its group."""
    from transformers import AutoTokenizer

    letters = random.Random(0)
    texts = ["".join(letters.choices(LETTERS, k=arguments.prompt)) for _ in range(arguments.batch // arguments.group)]
    prompts = [text for text in texts for _ in range(arguments.group)]
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    ids = [tokenizer(text)["input_ids"] for text in prompts]
    dtype = dtype_of(arguments)
    return Setting(folder, arguments.device, dtype, prompts, ids, arguments.new, arguments.group, arguments.repeats)


def shared_prompt(case: Setting, length: int = SHARED) -> list[list[int]]:
    """Return prompts of `length` tokens; a group shares its prompt."""
    letters = random.Random(2)
    every = sorted({token for ids in case.prompt_ids for token in ids})
    groups = [letters.choices(every, k=length) for _ in range(len(case.prompts) // case.group)]
    return [prompt for prompt in groups for _ in range(case.group)]


def next_turn(case: Setting, prompts: list[list[int]], answers: list[list[int]]) -> list[list[int]]:
    """Return the next turn's prompts: each conversation so far, and a random observation."""
    letters = random.Random(len(prompts[0]))
    return [
        [*prompt, *answer, *letters.choices(case.prompt_ids[0], k=OBSERVED)]
        for prompt, answer in zip(prompts, answers, strict=True)
    ]


def ragged(case: Setting) -> tuple[list[list[int]], list[int]]:
    """Return prompts and answer lengths of different sizes, as in agents' turns."""
    lengths = random.Random(1)
    prompts = [ids[: lengths.randint(len(ids) // 6, len(ids))] for ids in case.prompt_ids]
    return prompts, [lengths.randint(max(1, case.new // 6), case.new) for _ in prompts]
