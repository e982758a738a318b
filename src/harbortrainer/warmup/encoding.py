"""Demonstrations as token sequences, by the renderer that the rollouts use.

Invariant: the tokens are the ones that a rollout with the same texts has, since the prompt is rendered and the next
turn is bridged exactly as verifiers' train client does it: where the renderer cannot append a turn, the conversation is
rendered anew and becomes another sequence.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from renderers import AutoRendererConfig, create_renderer
from renderers.base import Message, Renderer
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedTokenizerBase

from harbortrainer.environment.chat_formats import has_known_format
from harbortrainer.warmup.demonstrations import Demonstration


@dataclass(frozen=True)
class Encoded:
    """`ids` [T] of one sequence; `answer` [T] is true where the model would have sampled."""

    ids: list[int]
    answer: list[bool]


def renderer_of(tokenizer: PreTrainedTokenizerBase) -> Renderer:
    """The renderer for a model of the hub; reasoning stays in the history, so that turns append."""
    known = has_known_format(tokenizer.name_or_path)
    return create_renderer(tokenizer, AutoRendererConfig(thinking_retention="all" if known else None))


def encode(demonstration: Demonstration, renderer: Renderer, tokenizer: PreTrainedTokenizerBase) -> list[Encoded]:
    """The sequences of one episode: one, unless the renderer cannot append a turn."""
    found: list[Encoded] = []
    messages: list[Message] = []
    prompt: list[int] = []
    said: list[int] = []
    for shown, reply in demonstration:
        messages.append({"role": "user", "content": shown})
        bridged = renderer.bridge_to_next_turn(prompt, said, messages[-1:]) if said else None
        if bridged is None:
            prompt = renderer.render_ids(messages, add_generation_prompt=True)
            before = Encoded([], [])
        else:
            prompt = bridged.token_ids
            before = found.pop()
        said = [*tokenizer.encode(reply, add_special_tokens=False), renderer.get_stop_token_ids()[0]]
        messages.append({"role": "assistant", "content": reply})
        answer = before.answer + [False] * (len(prompt) - len(before.ids)) + [True] * len(said)
        found.append(Encoded(prompt + said, answer))
    return found


def collate(rows: Iterable[Encoded], *, pad: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Pad to one length: ids [B, T], attention [B, T], labels [B, T] (-100 where nothing is learned)."""
    rows = list(rows)
    ids = [torch.tensor(row.ids) for row in rows]
    labels = [torch.where(torch.tensor(row.answer), row_ids, -100) for row, row_ids in zip(rows, ids, strict=True)]
    return (
        pad_sequence(ids, batch_first=True, padding_value=pad),
        pad_sequence([torch.ones_like(row) for row in ids], batch_first=True),
        pad_sequence(labels, batch_first=True, padding_value=-100),
    )
