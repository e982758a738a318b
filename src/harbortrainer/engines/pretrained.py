"""A pretrained model and its tokenizer, by a hub id or from a folder; what cannot be had is told in one line."""

from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import cast

import torch
from safetensors import SafetensorError
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from harbortrainer.errors import UserError


def load_model(
    model: str | Path,
    dtype: torch.dtype,
    *,
    where: str,
    attention: Callable[[PreTrainedConfig], str | None] = lambda config: None,
) -> PreTrainedModel:
    """A causal language model, on the CPU.

    Args:
        model: A hub id or a folder.
        dtype: Of its weights.
        where: What is to blame when there is none.
        attention: transformers' name of the attention that suits a model; by default its own choice.

    Raises:
        UserError: No such folder or hub id, no config, no weights, or unreadable ones.
    """
    with _blaming("the model cannot be loaded", where, "name a Hugging Face model, or a folder with its config.json"):
        config = AutoConfig.from_pretrained(str(model))
        return AutoModelForCausalLM.from_pretrained(
            str(model), config=config, dtype=dtype, attn_implementation=attention(config)
        )


def load_tokenizer(model: str | Path, *, where: str) -> PreTrainedTokenizerBase:
    """The tokenizer of the same folder or hub id.

    Raises:
        UserError: There is none.
    """
    with _blaming("there is no tokenizer", where, "put tokenizer.json beside the weights"):
        return cast("PreTrainedTokenizerBase", AutoTokenizer.from_pretrained(str(model)))


@contextmanager
def _blaming(what: str, where: str, do: str) -> Generator[None]:
    try:
        yield
    except (OSError, ValueError, SafetensorError) as error:
        reason = str(error).strip().partition("\n")[0].rstrip(".") or type(error).__name__
        raise UserError(f"{what} ({reason})", where=where, do=do) from error
