"""Write the weights and the tokenizer of an export: a peft adapter, or a whole model with the adapter merged.

Invariants: plain transformers and peft load every tensor by its name. Merged weights are computed in float32 and
rounded once, to the base model's dtype. This module imports torch.
"""

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from huggingface_hub import snapshot_download
from peft import LoraConfig
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, GenerationConfig, PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from harbortrainer.config.table import TomlTable
from harbortrainer.engines.models import load_model, load_tokenizer
from harbortrainer.engines.peft_internals import adapter_weights, inject_for_training
from harbortrainer.errors import UserError, first_line
from harbortrainer.evaluation.policy_files import ADAPTER_CONFIG, ADAPTER_FILE
from harbortrainer.export.hub_push import BaseModelOrigin
from harbortrainer.export.trained_weights import TrainedWeights

GENERATION = "generation_config.json"
PEFT_PREFIX = "base_model.model."
"""Prefix of peft's tensor names. Prime-RL omits it, and peft silently ignores tensors without it."""
TOKENIZER_FILES = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "*.model",
    "*.jinja",
    "chat_template.json",
    "additional_chat_templates/*",
)
"""Patterns of the files of a tokenizer and its chat templates."""
MODEL_FILES = ("*.safetensors", "*.json", *TOKENIZER_FILES)
EXCLUDED_FILES = ("original/*",)
"""Patterns of duplicate weights in some models' repositories."""


def adapter_tensors(weights: TrainedWeights) -> dict[str, torch.Tensor]:
    """Load the adapter's tensors by peft's names.

    Raises:
        UserError: The file cannot be read, or has a value that is not finite.
    """
    file = weights.folder / ADAPTER_FILE
    try:
        tensors = load_file(file)
    except (SafetensorError, OSError) as error:
        raise UserError(f"cannot be read ({error})", where=str(file), do="choose another --step") from None
    for name, tensor in tensors.items():
        if not tensor.isfinite().all():
            raise UserError(f"{name} has values that are not finite", where=str(file), do="choose an earlier --step")
    return {PEFT_PREFIX + name.removeprefix(PEFT_PREFIX): tensor for name, tensor in tensors.items()}


def write_adapter(folder: Path, tensors: Mapping[str, torch.Tensor], config: TomlTable, base: BaseModelOrigin) -> None:
    """Write an adapter in peft's format; its config has the base's hub id and commit, if it is on the hub."""
    named: TomlTable = {"base_model_name_or_path": base.hub_id, "revision": base.commit, "inference_mode": True}
    targets = config.get("target_modules")
    if isinstance(targets, list):
        named["target_modules"] = sorted(targets)
    (folder / ADAPTER_CONFIG).write_text(json.dumps(config | named, indent=2) + "\n", encoding="utf-8")
    save_file(dict(tensors), folder / ADAPTER_FILE, metadata={"format": "pt"})


def write_merged(
    folder: Path, tensors: Mapping[str, torch.Tensor], weights: TrainedWeights, base: BaseModelOrigin
) -> None:
    """Write the base with the adapter merged into it.

    Raises:
        UserError: The base cannot be loaded, or the adapter does not fit it.
    """
    disable_progress_bar()
    source = base_files(base, MODEL_FILES)
    model = load_model(source, torch.float32, where=base.loads_from)
    dtype = AutoConfig.from_pretrained(str(source)).dtype or torch.float32
    lora = LoraConfig.from_pretrained(str(weights.folder))
    lora.lora_dropout = 0.0
    lora.base_model_name_or_path = None  # a place, which a copied run does not have; peft would warn
    wrapped, _ = inject_for_training(model, lora)
    own = adapter_weights(wrapped, "default")
    differing = sorted(own.keys() ^ tensors.keys()) or sorted(n for n in own if own[n].shape != tensors[n].shape)
    if differing:
        what = f"the adapter does not fit {base.loads_from}: {len(differing)} tensors differ, first {differing[0]}"
        raise UserError(what, where=str(weights.folder), do="restore the base model that the run started from")
    with torch.no_grad():
        for name, parameter in own.items():
            parameter.copy_(tensors[name])
    _refuse_shared_head(model, own)
    merged = wrapped.merge_and_unload()
    merged.to(dtype).save_pretrained(str(folder))


def _refuse_shared_head(model: PreTrainedModel, adapted: Mapping[str, object]) -> None:
    config = model.config.get_text_config()
    if not config.tie_word_embeddings or not any(".lm_head." in name for name in adapted):
        return
    raise UserError(
        "the adapter changes lm_head, which this model ties to its embeddings, so merging would change both",
        where="--merged",
        do="export the adapter, or train without lm_head in trainer.model.lora.target_modules",
    )


def copy_whole_model(folder: Path, weights: TrainedWeights, base: BaseModelOrigin) -> None:
    """Copy a whole model's weights, with their config and generation config or else the base's."""
    for path in (*weights.folder.glob("*.safetensors"), *weights.folder.glob("*.safetensors.index.json")):
        shutil.copyfile(path, folder / path.name)
    source = weights.folder if (weights.folder / "config.json").is_file() else base_files(base, ("*.json",))
    AutoConfig.from_pretrained(str(source)).save_pretrained(str(folder))
    if (source / GENERATION).is_file():
        GenerationConfig.from_pretrained(str(source)).save_pretrained(str(folder))


def copy_tokenizer(folder: Path, base: BaseModelOrigin) -> None:
    """Copy the base's tokenizer and chat templates unchanged.

    Raises:
        UserError: There is no tokenizer, or the hub cannot be reached and its cache has none.
    """
    source = base_files(base, TOKENIZER_FILES)
    for pattern in TOKENIZER_FILES:
        for path in source.glob(pattern):
            if path.is_file():
                target = folder / path.relative_to(source)
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, target)
    load_tokenizer(source, where=base.loads_from)


def base_files(base: BaseModelOrigin, patterns: Sequence[str]) -> Path:
    """Return a folder with the base's files of these patterns; for a hub model, of the commit that was trained on.

    Raises:
        UserError: The hub cannot be reached and its cache has none.
    """
    if base.hub_id is None or Path(base.loads_from).is_dir():
        return Path(base.loads_from)
    try:
        wanted, unwanted = list(patterns), list(EXCLUDED_FILES)
        return Path(
            snapshot_download(base.loads_from, revision=base.commit, allow_patterns=wanted, ignore_patterns=unwanted)
        )
    except (OSError, ValueError) as error:
        what = f"cannot be downloaded from the hub ({first_line(error)})"
        raise UserError(
            what, where=base.loads_from, do="connect this machine to the hub, or download the model first"
        ) from None
