"""What a warm-up starts from: a model with the tokenizer and the renderer that make its tokens."""

from dataclasses import dataclass

import torch
from renderers.base import Renderer
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from harbortrainer.engines.pretrained import load_model, load_tokenizer
from harbortrainer.warmup.demonstrations import Demonstration
from harbortrainer.warmup.encoding import Encoded, encode, renderer_of


@dataclass(frozen=True)
class StartingPolicy:
    """A model, and what turns an episode into its tokens."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    renderer: Renderer

    def encode(self, demonstration: Demonstration) -> list[Encoded]:
        """The sequences of one episode."""
        return encode(demonstration, self.renderer, self.tokenizer)


def load_policy(name: str) -> StartingPolicy:
    """The model `name`, a hub id or a folder; on the GPU when there is one.

    Raises:
        UserError: transformers cannot load it.
    """
    tokenizer = load_tokenizer(name, where="warmup.model")
    model = load_model(name, torch.float32, where="warmup.model")
    if torch.cuda.is_available():
        model = model.to(dtype=torch.bfloat16, device="cuda")
    return StartingPolicy(model, tokenizer, renderer_of(tokenizer))
