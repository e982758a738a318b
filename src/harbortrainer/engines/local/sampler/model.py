"""Loading the policy: which files it needs, which device, dtype and attention it gets.

Contract: what the user can get wrong raises `UserError` naming the folder; the model comes back in eval mode, without
gradients, with an attention that continuous batching can use.
"""

import os
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

from harbortrainer.engines.local.sampler.attention import RAGGED_ATTENTION
from harbortrainer.engines.local.sampler.folder import check_folder
from harbortrainer.errors import UserError

# Below this a second thread costs more than it brings (two spinning threads on two shared cores: 3 times slower).
_ONE_THREAD_BELOW = 50_000_000


def resolve_device(device: str) -> torch.device:
    """`auto` is the first GPU when there is one.

    Raises:
        UserError: not a torch device, or a GPU that is not there.
    """
    if device == "auto":
        return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    try:
        resolved = torch.device(device)
    except RuntimeError as error:
        raise UserError(f"no such device: {device}", do='use "auto", "cpu" or "cuda"') from error
    if resolved.type == "cuda" and not torch.cuda.is_available():
        raise UserError(f"device {device}, but torch sees no GPU", do='use "auto" or "cpu"')
    return resolved


def resolve_dtype(dtype: str, device: torch.device) -> torch.dtype:
    """`auto` is bfloat16 on a GPU and float32 elsewhere.

    Raises:
        UserError: not a floating point dtype of torch.
    """
    if dtype == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    resolved = getattr(torch, dtype, None)
    if not isinstance(resolved, torch.dtype) or not resolved.is_floating_point:
        raise UserError(f"no such dtype: {dtype}", do="use float32, bfloat16 or float16")
    return resolved


def load_model(model: str | Path, *, device: torch.device, dtype: torch.dtype) -> PreTrainedModel:
    """Loads a causal LM for sampling.

    Raises:
        UserError: no weights, unreadable weights, not a causal LM, or a hub id that cannot be had.
    """
    check_folder(model)
    try:
        config = AutoConfig.from_pretrained(model)
        loaded = AutoModelForCausalLM.from_pretrained(
            model, config=config, dtype=dtype, attn_implementation=attention_for(config)
        )
    except (OSError, ValueError, SafetensorError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise UserError(f"cannot be loaded ({reason})", where=str(model), do="check [model] name") from error
    loaded.requires_grad_(False)
    return loaded.eval().to(device)


def load_tokenizer(model: str | Path) -> PreTrainedTokenizerBase:
    """The model's tokenizer.

    Raises:
        UserError: there is none.
    """
    try:
        tokenizer = AutoTokenizer.from_pretrained(model)
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise UserError(f"no tokenizer ({reason})", where=str(model), do="put tokenizer.json beside it") from error
    return cast("PreTrainedTokenizerBase", tokenizer)


def end_tokens(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Every token that ends a completion: the generation config's and the tokenizer's."""
    configured = getattr(model.generation_config, "eos_token_id", None)
    ids = configured if isinstance(configured, list) else [configured]
    return frozenset(i for i in [*ids, tokenizer.eos_token_id] if isinstance(i, int) and i >= 0)


def attention_for(config: PreTrainedConfig) -> str:
    """Our ragged attention where every layer attends to everything before it, else torch's SDPA with a mask."""
    text = config.get_text_config()
    kinds = set(getattr(text, "layer_types", None) or ["full_attention"])
    windowed = getattr(text, "sliding_window", None) and getattr(text, "use_sliding_window", True)
    plain = kinds == {"full_attention"} and not windowed and not getattr(text, "attn_logit_softcapping", None)
    return RAGGED_ATTENTION if plain else "sdpa"


def context_limit(config: PreTrainedConfig, wanted: int | None) -> int:
    """Longest prompt plus completion: what is wanted, or what the model was made for.

    Raises:
        UserError: more than the model was made for.
    """
    own = getattr(config.get_text_config(), "max_position_embeddings", None)
    if wanted is None:
        return own or 4096
    if own is not None and wanted > own:
        raise UserError(
            f"max_model_len {wanted} is more than the model's {own} positions", do=f"set it to {own} or less"
        )
    return wanted


def use_threads(model: PreTrainedModel) -> None:
    """One thread for a small model on the CPU, unless OMP_NUM_THREADS decides."""
    if (
        model.device.type == "cpu"
        and "OMP_NUM_THREADS" not in os.environ
        and model.num_parameters() < _ONE_THREAD_BELOW
    ):
        torch.set_num_threads(1)
