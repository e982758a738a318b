"""The weights of an export: a peft adapter, or a whole model with the adapter merged into it; tokenizer beside them.

Invariants: plain transformers and peft find every tensor by its name; a merged weight is computed in float32 and
rounded once, to the base model's own dtype. Imports torch.
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
from harbortrainer.engines.peft_internals import adapter_weights, inject_for_training
from harbortrainer.engines.pretrained import load_model, load_tokenizer
from harbortrainer.errors import UserError
from harbortrainer.evaluation.policy_files import ADAPTER_CONFIG, ADAPTER_FILE
from harbortrainer.export.base_model import BaseModelOrigin
from harbortrainer.export.trained_weights import TrainedWeights

GENERATION = "generation_config.json"
PEFT_PREFIX = "base_model.model."
"""What peft's names begin with; Prime-RL leaves it out, and peft would pass over such tensors without a word."""
BESIDE = (
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
"""The files of a tokenizer and its chat templates."""
WHOLE = ("*.safetensors", "*.json", *BESIDE)
NOT_WHOLE = ("original/*",)
"""The same weights once more, in some models' repositories."""


def adapter_tensors(weights: TrainedWeights) -> dict[str, torch.Tensor]:
    """The adapter's tensors by peft's names.

    Raises:
        UserError: The file cannot be read, or holds a number that is not finite.
    """
    file = weights.folder / ADAPTER_FILE
    try:
        tensors = load_file(file)
    except (SafetensorError, OSError) as error:
        raise UserError(f"cannot be read ({error})", where=str(file), do="choose another --step") from None
    for name, tensor in tensors.items():
        if not tensor.isfinite().all():
            raise UserError(f"{name} has numbers that are not finite", where=str(file), do="choose an earlier --step")
    return {PEFT_PREFIX + name.removeprefix(PEFT_PREFIX): tensor for name, tensor in tensors.items()}


def write_adapter(folder: Path, tensors: Mapping[str, torch.Tensor], config: TomlTable, base: BaseModelOrigin) -> None:
    """Write an adapter as peft does; its config names the base by its hub id and commit, or not at all."""
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
        UserError: The base cannot be loaded, or the adapter is another model's.
    """
    disable_progress_bar()
    source = files_of(base, WHOLE)
    model = load_model(source, torch.float32, where=base.here)
    dtype = AutoConfig.from_pretrained(str(source)).dtype or torch.float32
    lora = LoraConfig.from_pretrained(str(weights.folder))
    lora.lora_dropout = 0.0
    wrapped, _ = inject_for_training(model, lora)
    own = adapter_weights(wrapped, "default")
    odd = sorted(own.keys() ^ tensors.keys()) or sorted(n for n in own if own[n].shape != tensors[n].shape)
    if odd:
        what = f"the adapter does not fit {base.here}: {len(odd)} tensors differ, first {odd[0]}"
        raise UserError(what, where=str(weights.folder), do="put the base model back that the run started from")
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
        "the adapter changes lm_head, which this model shares with its embeddings: merged they would both change",
        where="--merged",
        do="export the adapter, and train without lm_head in trainer.model.lora.target_modules",
    )


def copy_whole_model(folder: Path, weights: TrainedWeights, base: BaseModelOrigin) -> None:
    """Copy a whole model's weights; config and generation config are those beside them, else the base's."""
    for path in (*weights.folder.glob("*.safetensors"), *weights.folder.glob("*.safetensors.index.json")):
        shutil.copyfile(path, folder / path.name)
    source = weights.folder if (weights.folder / "config.json").is_file() else files_of(base, ("*.json",))
    AutoConfig.from_pretrained(str(source)).save_pretrained(str(folder))
    if (source / GENERATION).is_file():
        GenerationConfig.from_pretrained(str(source)).save_pretrained(str(folder))


def copy_tokenizer(folder: Path, base: BaseModelOrigin) -> None:
    """Copy the base's tokenizer and chat templates as they are.

    Raises:
        UserError: There is none, or the hub cannot be reached and its cache has none.
    """
    source = files_of(base, BESIDE)
    for pattern in BESIDE:
        for path in source.glob(pattern):
            if path.is_file():
                target = folder / path.relative_to(source)
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, target)
    load_tokenizer(source, where=base.here)


def files_of(base: BaseModelOrigin, patterns: Sequence[str]) -> Path:
    """A folder with the base's files of these patterns; of a model on the hub those of the commit that was trained on.

    Raises:
        UserError: The hub cannot be reached and its cache has none.
    """
    if base.hub_id is None or Path(base.here).is_dir():
        return Path(base.here)
    try:
        wanted, unwanted = list(patterns), list(NOT_WHOLE)
        return Path(snapshot_download(base.here, revision=base.commit, allow_patterns=wanted, ignore_patterns=unwanted))
    except (OSError, ValueError) as error:
        what = f"cannot be had from the hub ({str(error).strip().splitlines()[0]})"
        raise UserError(what, where=base.here, do="let this machine reach the hub, or fetch the model first") from None
