"""The sampled model: its device, dtype, attention and adapters.

Contract:
    - A user's mistake raises `UserError` with the folder or key.
    - The model is in eval mode, without gradients, with an attention that continuous batching supports.
    - An adapter is loaded completely or not at all: names and shapes are checked before the first weight changes.
    - Each policy that still samples has its own adapter.

Adapters are not merged into the base weights: the sampler computes x W + (x A) B exactly as the learner does. Merging
is as exact in float32 (measured: 1e-6 in log-probability). In bfloat16 it would round away updates smaller than 1/256
of a weight, and the sampled policy would differ from the trained one.
"""

import os
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path

import torch
from peft import LoraConfig
from torch import nn
from transformers import (
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from harbortrainer.config.runfile import Quantization
from harbortrainer.engines import models
from harbortrainer.engines.attention.packed import has_only_full_attention
from harbortrainer.engines.attention.paged import RAGGED_ATTENTION
from harbortrainer.engines.models import needs_plain_sampling, require_sampling_support
from harbortrainer.engines.peft_internals import inject_for_sampling
from harbortrainer.engines.quantized_base import quantize
from harbortrainer.errors import UserError

# Parameters below which a second thread slows the model down (two spinning threads on two shared cores: 3 times).
_SINGLE_THREAD_BELOW = 50_000_000

_PREFIX = "base_model.model."
_FUNCTION_KEYS = ("r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern")


def resolve_device(device: str) -> torch.device:
    """Return the torch device; "auto" is the first GPU if there is one, else the CPU.

    Raises:
        UserError: It is not a torch device, or there is no such GPU.
    """
    if device == "auto":
        return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    try:
        resolved = torch.device(device)
    except RuntimeError as error:
        raise UserError(f"unknown device: {device}", do='use "auto", "cpu" or "cuda"') from error
    if resolved.type == "cuda" and not torch.cuda.is_available():
        raise UserError(f"device {device}, but torch sees no GPU", do='use "auto" or "cpu"')
    return resolved


def resolve_dtype(dtype: str, device: torch.device) -> torch.dtype:
    """Return the torch dtype; "auto" is bfloat16 on a GPU and float32 elsewhere.

    Raises:
        UserError: It is not a floating point dtype of torch.
    """
    if dtype == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    resolved = getattr(torch, dtype, None)
    if not isinstance(resolved, torch.dtype) or not resolved.is_floating_point:
        raise UserError(f"unknown dtype: {dtype}", do="use float32, bfloat16 or float16")
    return resolved


def load_model(
    model: str | Path, *, device: torch.device, dtype: torch.dtype, quantization: Quantization | None = None
) -> PreTrainedModel:
    """Load a causal language model for sampling.

    Raises:
        UserError: See `models.require_sampling_support`, `models.load_model` and `quantized_base.quantize`.
    """
    require_sampling_support(models.load_config(model, where=str(model)), str(model))
    loaded = models.load_model(model, dtype, where=str(model), attention=attention_for)
    if quantization is not None:
        quantize(loaded, quantization, device)
    loaded.requires_grad_(False)
    return loaded.eval().to(device)


def eos_tokens(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Return every token that ends a completion, from the generation config and the tokenizer."""
    configured = getattr(model.generation_config, "eos_token_id", None)
    ids = configured if isinstance(configured, list) else [configured]
    return frozenset(i for i in [*ids, tokenizer.eos_token_id] if isinstance(i, int) and i >= 0)


def attention_for(config: PreTrainedConfig) -> str | None:
    """Return our ragged attention if every layer has full causal attention, else torch's SDPA with a mask.

    None, transformers' own choice, for a model that continuous batching cannot sample.
    """
    if needs_plain_sampling(config):
        return None
    return RAGGED_ATTENTION if has_only_full_attention(config) else "sdpa"


def context_limit(config: PreTrainedConfig, wanted: int | None) -> int:
    """Return the longest prompt plus completion, in tokens: `wanted`, or the model's own limit.

    Raises:
        UserError: `wanted` is more than the model supports.
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
    """Use one thread for a small model on the CPU, unless OMP_NUM_THREADS is set."""
    if (
        model.device.type == "cpu"
        and "OMP_NUM_THREADS" not in os.environ
        and model.num_parameters() < _SINGLE_THREAD_BELOW
    ):
        torch.set_num_threads(1)


class AdapterError(ValueError):
    """The weights of an update, an adapter's or all, do not fit the model."""


@torch.no_grad()
def load_weights(model: nn.Module, source: Mapping[str, torch.Tensor]) -> None:
    """Copy every weight into the model; tied weights are copied once.

    Raises:
        AdapterError: Names or shapes do not match; then nothing has changed.
    """
    weights = dict(model.named_parameters())
    _check_names_and_shapes(source, weights, "weights'")
    for name, tensor in source.items():
        weights[name].copy_(tensor)


def _check_names_and_shapes(source: Mapping[str, torch.Tensor], own: Mapping[str, torch.Tensor], what: str) -> None:
    if different := sorted(source.keys() ^ own.keys()):
        raise AdapterError(f"the {what} tensors are not the model's: {len(different)} differ, first {different[0]}")
    for name, tensor in source.items():
        if tensor.shape != own[name].shape:
            raise AdapterError(f"{name} is {tuple(tensor.shape)}, not {tuple(own[name].shape)}")


class SampledAdapters:
    """A model's adapters: one for each policy that samples, created as needed and reused.

    Args:
        model: The sampled model. Adding an adapter adds modules to it.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._config: LoraConfig | None = None
        self._weights: dict[str, Mapping[str, torch.Tensor]] = {}

    @torch.no_grad()
    def load(
        self, state: Mapping[str, torch.Tensor], config: LoraConfig | None, in_use: Collection[str | None] = ()
    ) -> str:
        """Copy `state` (peft's keys) into an unused adapter of the model.

        Returns:
            The adapter's name.

        Raises:
            AdapterError: The first adapter has no config, or the config or names differ from the loaded adapter's.
        """
        if config is not None:
            self._check(config)
        if self._config is None:
            raise AdapterError("the first adapter needs its LoraConfig")
        adapter, weights = self._unused_adapter(self._config, in_use)
        source = {key.removeprefix(_PREFIX): tensor for key, tensor in state.items()}
        _check_names_and_shapes(source, weights, "adapter's")
        for name, tensor in source.items():
            weights[name].copy_(tensor)
        return adapter

    def _check(self, config: LoraConfig) -> None:
        _check_plain_lora(config)
        if self._config is None:
            # The initial weights are overwritten at once, so expensive initializations must not run.
            self._config = replace(config, init_lora_weights=True, inference_mode=True)
        elif _function_of(config) != _function_of(self._config):
            raise AdapterError("rank, alpha or target modules differ from the loaded adapter's")

    def _unused_adapter(
        self, config: LoraConfig, in_use: Collection[str | None]
    ) -> tuple[str, Mapping[str, torch.Tensor]]:
        """Return an adapter that is not in use; creates one if needed."""
        unused = next((name for name in self._weights if name not in in_use), None)
        if unused is None:
            unused = f"policy{len(self._weights) or ''}"
            self._weights[unused] = inject_for_sampling(self._model, config, unused, self._model.dtype)
        return unused, self._weights[unused]


def _check_plain_lora(config: LoraConfig) -> None:
    for key in ("use_dora", "modules_to_save", "trainable_token_indices", "lora_bias"):
        if getattr(config, key):
            raise AdapterError(f"{key} is not supported: only plain LoRA is")


def _function_of(config: LoraConfig) -> tuple[object, ...]:
    """Return the settings that determine which function the adapter's weights compute."""
    targets = config.target_modules
    return (
        *(getattr(config, key) for key in _FUNCTION_KEYS),
        targets if isinstance(targets, str) else set(targets or ()),
    )
