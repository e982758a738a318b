"""Transcripts as token sequences, by the renderer that the rollouts use.

Invariant: the tokens of an episode are the ones that a rollout with the same texts has, since the prompt is rendered and
each next turn is bridged exactly as verifiers' train client does it.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from renderers.base import Renderer
from transformers import PreTrainedTokenizerBase

from harbortrainer.warmup.transcripts import Transcript


@dataclass(frozen=True)
class Encoded:
    """`ids` [T] of one episode; `answer` [T] is true where the model would have sampled."""

    ids: list[int]
    answer: list[bool]


def encode(transcript: Transcript, renderer: Renderer, tokenizer: PreTrainedTokenizerBase) -> Encoded:
    """Render one episode.

    Raises:
        ValueError: The renderer cannot append a turn, so that an episode would not be one sequence.
    """
    ids: list[int] = []
    answer: list[bool] = []
    said: list[int] = []
    for shown, reply in transcript.turns:
        message = [{"role": "user", "content": shown}]
        if not ids:
            prompt = renderer.render_ids(message, add_generation_prompt=True)
        else:
            bridged = renderer.bridge_to_next_turn(ids[: -len(said)], said, message)
            if bridged is None:
                raise ValueError(f"{type(renderer).__name__} cannot append a turn; set thinking_retention = 'all'")
            prompt = bridged.token_ids
        said = [*tokenizer.encode(reply, add_special_tokens=False), tokenizer.eos_token_id]
        answer += [False] * (len(prompt) - len(ids)) + [True] * len(said)
        ids = prompt + said
    return Encoded(ids, answer)


def collate(episodes: Iterable[Encoded], *, pad: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Pad to one length: ids [B, T], attention [B, T], labels [B, T] (-100 where nothing is learned)."""
    rows = list(episodes)
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
