"""The sampled model: its device, dtype and attention, and its adapters.

Contract: what the user can get wrong raises `UserError` naming the folder or the key; the model comes back in eval
mode, without gradients, with an attention that continuous batching can use. An adapter is taken whole or not at all:
names and shapes are checked before the first weight changes. Each policy that still samples has its own.

An adapter is not merged into the base weights: the sampler computes x W + (x A) B exactly as the learner does. Merged
weights are as good in float32 (measured: 1e-6 in log-probability), but in bfloat16 an update smaller than 1/256 of a
weight would be rounded away and the sampled policy would not be the trained one.
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
from harbortrainer.engines import pretrained
from harbortrainer.engines.architectures import need_sampled
from harbortrainer.engines.packed_attention import attends_to_all
from harbortrainer.engines.peft_internals import inject_for_sampling
from harbortrainer.engines.quantized_base import quantize
from harbortrainer.engines.ragged_attention import RAGGED_ATTENTION
from harbortrainer.errors import UserError

# Below this a second thread costs more than it brings (two spinning threads on two shared cores: 3 times slower).
_ONE_THREAD_BELOW = 50_000_000

_PREFIX = "base_model.model."
_COMPUTED = ("r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern")


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


def load_model(
    model: str | Path, *, device: torch.device, dtype: torch.dtype, quantization: Quantization | None = None
) -> PreTrainedModel:
    """A causal LM, loaded for sampling; raises as `architectures.need_sampled`, `pretrained.load_model` and
    `quantized_base.quantize`."""
    need_sampled(pretrained.load_config(model, where=str(model)), str(model))
    loaded = pretrained.load_model(model, dtype, where=str(model), attention=attention_for)
    if quantization is not None:
        quantize(loaded, quantization, device)
    loaded.requires_grad_(False)
    return loaded.eval().to(device)


def end_tokens(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Every token that ends a completion: the generation config's and the tokenizer's."""
    configured = getattr(model.generation_config, "eos_token_id", None)
    ids = configured if isinstance(configured, list) else [configured]
    return frozenset(i for i in [*ids, tokenizer.eos_token_id] if isinstance(i, int) and i >= 0)


def attention_for(config: PreTrainedConfig) -> str:
    """Our ragged attention where every layer attends to everything before it, else torch's SDPA with a mask."""
    return RAGGED_ATTENTION if attends_to_all(config) else "sdpa"


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


class AdapterError(ValueError):
    """What is handed over, an adapter or every weight, does not fit the model."""


@torch.no_grad()
def load_weights(model: nn.Module, source: Mapping[str, torch.Tensor]) -> None:
    """Copies every weight, those that are tied once, into the model.

    Raises:
        AdapterError: names or shapes that do not match; nothing has changed then.
    """
    weights = dict(model.named_parameters())
    _check_same(source, weights, "weights'")
    for name, tensor in source.items():
        weights[name].copy_(tensor)


def _check_same(given: Mapping[str, torch.Tensor], own: Mapping[str, torch.Tensor], what: str) -> None:
    if odd := sorted(given.keys() ^ own.keys()):
        raise AdapterError(f"the {what} tensors are not the model's: {len(odd)} differ, first {odd[0]}")
    for name, tensor in given.items():
        if tensor.shape != own[name].shape:
            raise AdapterError(f"{name} is {tuple(tensor.shape)}, not {tuple(own[name].shape)}")


class SampledAdapters:
    """The adapters of a model: none until the first load, then one for each policy that samples; they are used again.

    Args:
        model: The sampled model; modules are added to it when an adapter more is needed.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._config: LoraConfig | None = None
        self._weights: dict[str, Mapping[str, torch.Tensor]] = {}

    @torch.no_grad()
    def load(
        self, state: Mapping[str, torch.Tensor], config: LoraConfig | None, in_use: Collection[str | None] = ()
    ) -> str:
        """Copies `state` (peft's keys) into an adapter of the model that is not in use.

        Returns:
            Its name.

        Raises:
            AdapterError: no config yet, another shape than the adapter already loaded, names that do not match.
        """
        if config is not None:
            self._check(config)
        if self._config is None:
            raise AdapterError("the first adapter needs its LoraConfig")
        adapter, weights = self._free(self._config, in_use)
        given = {key.removeprefix(_PREFIX): tensor for key, tensor in state.items()}
        _check_same(given, weights, "adapter's")
        for name, tensor in given.items():
            weights[name].copy_(tensor)
        return adapter

    def _check(self, config: LoraConfig) -> None:
        _check_plain(config)
        if self._config is None:
            # Initialization is overwritten at once; the expensive kinds must not run.
            self._config = replace(config, init_lora_weights=True, inference_mode=True)
        elif _computed(config) != _computed(self._config):
            raise AdapterError("another rank, alpha or target than the adapter already loaded")

    def _free(self, config: LoraConfig, in_use: Collection[str | None]) -> tuple[str, Mapping[str, torch.Tensor]]:
        """One that is there and not in use, or another one."""
        free = next((name for name in self._weights if name not in in_use), None)
        if free is None:
            free = f"policy{len(self._weights) or ''}"
            self._weights[free] = inject_for_sampling(self._model, config, free, self._model.dtype)
        return free, self._weights[free]


def _check_plain(config: LoraConfig) -> None:
    for key in ("use_dora", "modules_to_save", "trainable_token_indices", "lora_bias"):
        if getattr(config, key):
            raise AdapterError(f"{key} is not supported, only plain LoRA")


def _computed(config: LoraConfig) -> tuple[object, ...]:
    """What decides which function the weights are."""
    targets = config.target_modules
    return (*(getattr(config, key) for key in _COMPUTED), targets if isinstance(targets, str) else set(targets or ()))
