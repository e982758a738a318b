"""What a warm-up starts from: a fresh tiny model, or one of the user's."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from renderers import Qwen3RendererConfig, create_renderer
from renderers.base import Renderer
from transformers import AutoModelForCausalLM, AutoTokenizer

from harbortrainer.errors import UserError
from harbortrainer.warmup.encoding import Encoded, encode, renderer_of
from harbortrainer.warmup.policy import fresh_policy
from harbortrainer.warmup.tokenizer import train_tokenizer
from harbortrainer.warmup.transcripts import Transcript


@dataclass(frozen=True)
class Pupil:
    """A model with the tokenizer and the renderer that make its tokens."""

    model: Any
    tokenizer: Any
    renderer: Renderer

    def encode(self, transcript: Transcript) -> list[Encoded]:
        """The sequences of one episode."""
        return encode(transcript, self.renderer, self.tokenizer)


def fresh(episodes: Sequence[Transcript], *, seed: int) -> Pupil:
    """A tiny model with random weights, and a tokenizer trained on `episodes`."""
    tokenizer = train_tokenizer(episodes)
    renderer = create_renderer(tokenizer, Qwen3RendererConfig(thinking_retention="all"))
    return Pupil(fresh_policy(tokenizer, seed=seed), tokenizer, renderer)


def load(name: str) -> Pupil:
    """The model `name`, a hub id or a folder; on the GPU when there is one.

    Raises:
        UserError: transformers cannot load it.
    """
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(name)
        model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32)
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0].rstrip(".")
        raise UserError(
            reason, where="warmup.model", do="name a hub id or a folder with weights and tokenizer"
        ) from error
    if torch.cuda.is_available():
        model = model.to(dtype=torch.bfloat16, device="cuda")
    return Pupil(model, tokenizer, renderer_of(tokenizer))
