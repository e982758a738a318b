"""A random model of Qwen3's architecture with a byte-level tokenizer, built in well under a second.

It has everything that a real model folder has: config, safetensors, generation config, and a tokenizer with a ChatML
template that supports tools.
"""

from pathlib import Path

CHAT_TEMPLATE = (
    "{%- if tools %}<|im_start|>system\nTools: {{ tools | tojson }}<|im_end|>\n{%- endif %}"
    "{%- for message in messages %}"
    "{{ '<|im_start|>' + message.role + '\n' + (message.content or '') + '<|im_end|>' + '\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{%- endif %}"
)
SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
QWEN3_TOKENS = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"]
"""Additional tokens of Qwen3's chat format."""
TEXT = [
    "the quick brown fox jumps over the lazy dog",
    "system user assistant",
    '{"commands": [{"keystrokes": "ls\\n"}]}',
]


def build_tiny_tokenizer(vocab: int = 320):
    """Build a byte-level BPE tokenizer of at most `vocab` entries (minimum 259: all bytes and 3 special tokens)."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab, special_tokens=SPECIAL_TOKENS, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(TEXT, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def build_tiny_model(
    path: Path | str,
    *,
    vocab: int = 320,
    seed: int = 0,
    hidden: int = 64,
    layers: int = 2,
    head_dim: int = 16,
    max_position_embeddings: int = 2048,
) -> Path:
    """Save a random model and its tokenizer to `path`, and return it.

    Args:
        path: A folder; created if missing.
        vocab: Size of the embedding, and upper limit for the tokenizer.
        seed: Seed of the weights.
        hidden: Hidden size; there are two query heads per key/value head.
        layers: Number of transformer blocks.
        head_dim: Dimension of an attention head.
        max_position_embeddings: The longest context.
    """
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    path = Path(path)
    tokenizer = build_tiny_tokenizer(vocab)
    heads = max(2, hidden // head_dim)
    config = Qwen3Config(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads // 2,
        head_dim=head_dim,
        max_position_embeddings=max_position_embeddings,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.convert_tokens_to_ids("<|im_end|>"),
        pad_token_id=tokenizer.convert_tokens_to_ids("<|endoftext|>"),
        # Large enough for a peaked distribution: a flat one would hide sampling errors.
        initializer_range=0.2,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(config)
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


def build_untied_model(path: Path | str, **shape: int) -> Path:
    """Save a random model whose output matrix is not tied to the embeddings."""
    import torch
    from transformers import AutoModelForCausalLM

    path = build_tiny_model(path, **shape)
    model = AutoModelForCausalLM.from_pretrained(path)
    model.config.tie_word_embeddings = False
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().flip(0).clone())
    model.save_pretrained(path)
    return path
