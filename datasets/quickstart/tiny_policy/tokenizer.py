"""A small tokenizer, trained on demonstrations, with Qwen3's special tokens.

Byte-level BPE, so that it can write any text. What is the same in every episode (Terminus-2's prompt, the frame of its
JSON, the empty rows of a screen) is one token each, which makes an episode of 4 000 characters about 70 tokens long.
Invariant: decoding what was encoded gives the same text.
"""

from collections.abc import Iterable

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from harbortrainer.warmup.demonstrations import CONFIRMED, Demonstration
from tiny_policy import prompts

IM_START, IM_END, PAD = "<|im_start|>", "<|im_end|>", "<|endoftext|>"
QWEN3_TOKENS = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"]
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""Qwen3's without tools and reasoning: a turn only ever appends, so that an episode stays one branch."""


def train_tokenizer(episodes: Iterable[Demonstration], *, vocab_size: int = 800) -> PreTrainedTokenizerFast:
    """Train the tokenizer on `episodes`; `vocab_size` counts everything."""
    fixed = fixed_parts()
    tokenizer = Tokenizer(models.BPE())
    words = Regex(r" ?[A-Za-z]+| ?[0-9]+|\n+| ?[^\sA-Za-z0-9]+|\s+")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(words, "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    special = [PAD, IM_START, IM_END, *QWEN3_TOKENS]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(fixed),
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_free_text(episodes, fixed), trainer)
    tokenizer.add_tokens([AddedToken(part, normalized=False, special=False) for part in fixed])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=IM_END, pad_token=PAD, chat_template=CHAT_TEMPLATE
    )


def fixed_parts() -> list[str]:
    """The texts that become one token each."""
    before, rest = prompts.template().replace("{{", "{").replace("}}", "}").split("{instruction}")
    between = rest.split("{terminal_state}")[0]
    sure = prompts.confirmation_prompt([], "late").rpartition("\n")[2]
    opening, closing = prompts.solved(["x"]).split("x")
    rows = ["\n" * n for n in range(prompts.PANE_HEIGHT - 4, prompts.PANE_HEIGHT + 3)]
    headings = ["Current Terminal Screen:\n", "New Terminal Output:\n", "Current terminal state:\n"]
    return [before, between, sure, opening, closing, CONFIRMED, *headings, *rows]


def _free_text(episodes: Iterable[Demonstration], fixed: list[str]) -> Iterable[str]:
    for episode in episodes:
        for shown, said in episode:
            for text in (shown, said):
                for part in sorted(fixed, key=len, reverse=True):
                    text = text.replace(part, "\0")
                yield from text.split("\0")
