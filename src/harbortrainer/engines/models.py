"""Loads pretrained models and tokenizers, by hub id or from a folder, and checks which models can be sampled.

Contract:
    - A model that cannot be loaded, or that lacks tokens of its tokenizer, raises a one-line `UserError`.
    - `share_weights` makes a second model without copying the weights.
    - `require_sampling_support` and `needs_plain_sampling` read the config alone, before any weight is loaded.
    - transformers' continuous batching caches keys and values and no other state, and replaces the model's attention
      through transformers' registry. `generate` samples every causal language model.
"""

import copy
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from pathlib import Path
from typing import cast

import torch
from safetensors import SafetensorError
from torch import nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils.logging import disable_progress_bar

from harbortrainer.errors import UserError, first_line
from harbortrainer.private_apis import PrivateApi, places_in


def load_config(model: str | Path, *, where: str) -> PreTrainedConfig:
    """Load a model's config alone.

    Raises:
        UserError: There is no such folder or hub id, or its config is missing or unreadable.
    """
    with _as_user_error(
        "the model's config cannot be read", where, "name a Hugging Face model, or a folder with its config"
    ):
        return AutoConfig.from_pretrained(str(model))


def load_model(
    model: str | Path,
    dtype: torch.dtype,
    *,
    where: str,
    attention: Callable[[PreTrainedConfig], str | None] = lambda config: None,
) -> PreTrainedModel:
    """Load a causal language model, on the CPU.

    Args:
        model: A hub id or a folder.
        dtype: Of its weights.
        where: The key or path that an error names.
        attention: Returns transformers' attention name for a config; by default transformers chooses.

    Raises:
        UserError: There is no such folder or hub id, or its config or weights are missing or unreadable.
    """
    with _as_user_error(
        "the model cannot be loaded", where, "name a Hugging Face model, or a folder with its config.json"
    ):
        config = AutoConfig.from_pretrained(str(model))
        if Path(model).is_dir():
            disable_progress_bar()  # a folder is read in seconds
        return AutoModelForCausalLM.from_pretrained(
            str(model), config=config, dtype=dtype, attn_implementation=attention(config)
        )


def build_meta_model(
    model: str | Path, dtype: torch.dtype, *, attention: Callable[[PreTrainedConfig], str | None]
) -> PreTrainedModel:
    """Build a causal language model on torch's meta device from its config: shapes and names without weights.

    Arguments and errors: see `load_model`.
    """
    with _as_user_error(
        "the model's config cannot be read", "model.name", "name a Hugging Face model, or a folder with its config"
    ):
        config = AutoConfig.from_pretrained(str(model))
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention(config))


def share_weights(model: PreTrainedModel) -> PreTrainedModel:
    """Return a second model with the same weights in memory.

    Modules, config and buffers are separate, so each model can have its own adapter, attention and mode. The second
    model is frozen and has transformers' default attention. Tied weights stay tied.

    Both models may compute at the same time in two threads. Nothing may write to a weight: autograd's version counters
    are shared too, so a write between a forward and its backward pass raises an error.

    Raises:
        ValueError: `model` already has an adapter, which would be shared too.
    """
    if any("lora_" in name for name, _ in model.named_parameters()):
        raise ValueError("the model has an adapter: share it before the first one is loaded")
    shared: dict[int, object] = {id(p): nn.Parameter(p.detach(), requires_grad=False) for p in model.parameters()}
    return _copy(model, shared)


def copy_model(model: PreTrainedModel) -> PreTrainedModel:
    """Return a second model with a copy of the weights, for writing; otherwise like `share_weights`."""
    return _copy(model, {})


def _copy(model: PreTrainedModel, memo: dict[int, object]) -> PreTrainedModel:
    copied = copy.deepcopy(model, memo)
    copied.set_attn_implementation(copied.get_correct_attn_implementation(None))
    return copied


def load_tokenizer(model: str | Path, *, where: str) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a folder or hub id.

    Raises:
        UserError: There is none.
    """
    with _as_user_error("there is no tokenizer", where, "put tokenizer.json beside the weights"):
        return cast("PreTrainedTokenizerBase", AutoTokenizer.from_pretrained(str(model)))


def require_vocabulary(
    tokenizer: PreTrainedTokenizerBase, config: PreTrainedConfig, model: str, *, where: str, used: Iterable[int] = ()
) -> None:
    """Check that the model has each token that text can become, the end of a turn, and the tokens of `used`.

    Other tokens that a tokenizer adds, for padding say, need not be in the model.

    Args:
        tokenizer: The model's tokenizer.
        config: The model's config.
        model: The model's name, for messages.
        where: The key or path that an error names.
        used: Ids of further tokens, such as those of a chat format.

    Raises:
        UserError: The model lacks tokens.
    """
    size, added, end = config.get_text_config().vocab_size, tokenizer.get_added_vocab(), tokenizer.eos_token_id
    own = (number for token, number in tokenizer.get_vocab().items() if token not in added)
    needed = {*own, *used, *([end] if isinstance(end, int) else [])}
    if missing := [number for number in needed if number >= size]:
        shown = ascii(tokenizer.convert_ids_to_tokens(min(missing)))
        what = f"the tokenizer has tokens that the model {model} of {size} tokens lacks: {len(missing)}, e.g. {shown}"
        raise UserError(what, where=where, do="use the tokenizer of these weights, or resize the model's embeddings")


@contextmanager
def _as_user_error(what: str, where: str, do: str) -> Generator[None]:
    try:
        yield
    except (OSError, ValueError, SafetensorError) as error:
        reason = first_line(error).rstrip(".")
        raise UserError(f"{what} ({reason})", where=where, do=do) from error


_USED = {
    "transformers:PreTrainedConfig": "per_layer_attributes",
    "transformers:PreTrainedModel": "_is_stateful; _supports_attention_backend; _supports_sdpa",
}
PRIVATE_APIS = PrivateApi("transformers", "5.24", __name__, places_in(_USED))
PRIVATE_APIS.check()

_SUPPORTED_LAYERS = {"full_attention", "sliding_attention"}
_ALTERNATIVES = 'train it on Prime-RL, or set engine = "vllm" in [inference] on a machine with a GPU'


def require_sampling_support(config: PreTrainedConfig, model: str, *, where: str = "") -> None:
    """Raise an error if the embedded engine cannot sample from this architecture.

    Args:
        model: The model's name, for the message.
        where: The key that named it, if any.

    Raises:
        UserError: It is not supported; with the reason and the alternatives.
    """
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        reason = f"transformers has no causal language model of type {config.model_type}"
        raise unsupported_model(model, reason, where=where)


def unsupported_model(model: str, reason: str, *, where: str = "") -> UserError:
    """Build the error for a model that the embedded engine cannot sample from."""
    return UserError(f"the embedded engine cannot sample from {model}: {reason}", where=where, do=_ALTERNATIVES)


def needs_plain_sampling(config: PreTrainedConfig) -> str:
    """Return why continuous batching cannot sample from this architecture; empty if it can."""
    found = cast("type[PreTrainedModel]", MODEL_FOR_CAUSAL_LM_MAPPING[type(config)])
    name, text = found.__name__, config.get_text_config()
    if layers := set(getattr(text, "layer_types", None) or ()) - _SUPPORTED_LAYERS:
        return f"{name} has layers of type {', '.join(sorted(layers))}, and not only full and sliding attention"
    if different := text.per_layer_attributes:
        return f"{name} has layers that differ in {', '.join(sorted(different))}"
    if getattr(text, "qk_nope_head_dim", 0) and text.qk_nope_head_dim + text.qk_rope_head_dim != text.v_head_dim:
        return f"{name} has values and keys of different widths"
    if found._is_stateful:
        return f"{name} keeps state other than keys and values"
    if not (found._supports_sdpa and found._supports_attention_backend):
        return f"{name} has a custom attention that cannot be replaced"
    return ""
