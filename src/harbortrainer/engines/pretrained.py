"""A pretrained model and its tokenizer, by a hub id or from a folder; what cannot be had is told in one line.

A model that is loaded can be had a second time without its weights taking memory again.
"""

import copy
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import cast

import torch
from safetensors import SafetensorError
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from harbortrainer.errors import UserError


def load_config(model: str | Path, *, where: str) -> PreTrainedConfig:
    """A model's config alone.

    Raises:
        UserError: No such folder or hub id, no config, or an unreadable one.
    """
    with _blaming("the model's config cannot be read", where, "name a Hugging Face model, or a folder with its config"):
        return AutoConfig.from_pretrained(str(model))


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


def empty_model(
    model: str | Path, dtype: torch.dtype, *, where: str, attention: Callable[[PreTrainedConfig], str]
) -> PreTrainedModel:
    """A causal language model without content, on torch's meta device: shapes, names and code, from its config alone.

    Args and errors are `load_model`'s.
    """
    with _blaming("the model's config cannot be read", where, "name a Hugging Face model, or a folder with its config"):
        config = AutoConfig.from_pretrained(str(model))
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention(config))


def second_model(model: PreTrainedModel) -> PreTrainedModel:
    """Another model of the very same weights, each of which stays in memory once.

    Modules, config and buffers are its own, so that either can be given an adapter, an attention and a mode without the
    other. It is frozen, and has the attention that transformers chooses by itself. Weights that are tied stay tied.

    Both may compute at the same time, in two threads; nothing may write into a weight. The two share what autograd
    knows of writes too: one between a forward pass and its backward pass is an error of torch's.

    Raises:
        ValueError: `model` has an adapter already, which would be shared as well.
    """
    if any("lora_" in name for name, _ in model.named_parameters()):
        raise ValueError("the model has an adapter: share it before the first one is loaded")
    shared: dict[int, object] = {id(p): nn.Parameter(p.detach(), requires_grad=False) for p in model.parameters()}
    return _copied(model, shared)


def own_model(model: PreTrainedModel) -> PreTrainedModel:
    """Another model with weights of its own, equal ones, to be written to; else as `second_model`."""
    return _copied(model, {})


def _copied(model: PreTrainedModel, instead: dict[int, object]) -> PreTrainedModel:
    copied = copy.deepcopy(model, instead)
    copied.set_attn_implementation(copied.get_correct_attn_implementation(None))
    return copied


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
