"""Transcripts as token sequences, by the renderer that the rollouts use.

Invariant: the tokens are the ones that a rollout with the same texts has, since the prompt is rendered and the next
turn is bridged exactly as verifiers' train client does it: where the renderer cannot append a turn, the conversation is
rendered anew and becomes another sequence.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from renderers import AutoRendererConfig, create_renderer
from renderers.base import MODEL_RENDERER_MAP, Message, Renderer
from transformers import PreTrainedTokenizerBase

from harbortrainer.warmup.transcripts import Transcript


@dataclass(frozen=True)
class Encoded:
    """`ids` [T] of one sequence; `answer` [T] is true where the model would have sampled."""

    ids: list[int]
    answer: list[bool]


def renderer_of(tokenizer: PreTrainedTokenizerBase) -> Renderer:
    """The renderer for a model of the hub; reasoning stays in the history, so that turns append."""
    known = tokenizer.name_or_path in MODEL_RENDERER_MAP
    return create_renderer(tokenizer, AutoRendererConfig(thinking_retention="all" if known else None))


def encode(transcript: Transcript, renderer: Renderer, tokenizer: PreTrainedTokenizerBase) -> list[Encoded]:
    """The sequences of one episode: one, unless the renderer cannot append a turn."""
    found: list[Encoded] = []
    messages: list[Message] = []
    prompt: list[int] = []
    said: list[int] = []
    for shown, reply in transcript.turns:
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
    length = max(len(row.ids) for row in rows)
    ids = torch.full((len(rows), length), pad)
    attention = torch.zeros((len(rows), length), dtype=torch.long)
    labels = torch.full((len(rows), length), -100)
    for i, row in enumerate(rows):
        n = len(row.ids)
        ids[i, :n] = torch.tensor(row.ids)
        attention[i, :n] = 1
        labels[i, :n] = torch.where(torch.tensor(row.answer), ids[i, :n], -100)
    return ids, attention, labels
