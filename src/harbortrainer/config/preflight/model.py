"""The policy's files: in a folder, in the hub's cache, or on the hub."""

import os
import re
from collections.abc import Iterator
from pathlib import Path

import httpx

from harbortrainer.config.preflight.credentials import value
from harbortrainer.config.preflight.facts import Facts
from harbortrainer.config.preflight.finding import Finding, green, red

WEIGHTS = ("*.safetensors", "pytorch_model*.bin")
HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
TIMEOUT_S = 5.0


def check(facts: Facts) -> Iterator[Finding]:
    """Whether the policy can be loaded."""
    if facts.raw is None:
        return
    if facts.get("warmup") is not None:
        yield green("model", "made by [warmup]")
        return
    folder = Path(facts.model)
    if folder.is_dir():
        yield in_folder(folder)
    elif HUB_ID.fullmatch(facts.model) and not facts.model.startswith("."):
        yield on_hub(facts.model)
    else:
        yield red("model", f"no such folder: {facts.model}", "set [model] name to a folder or a hub id")


def in_folder(folder: Path) -> Finding:
    """A model folder is a config, weights and a tokenizer."""
    if not (folder / "config.json").is_file():
        return red("model", f"no config.json in {folder}", "point [model] name at a Hugging Face model's folder")
    if not any(any(folder.glob(pattern)) for pattern in WEIGHTS):
        return red("model", f"no weights in {folder}", "it needs *.safetensors; was the download cut?")
    if not any(folder.glob("tokenizer*.json")):
        return red("model", f"no tokenizer in {folder}", "copy tokenizer.json and tokenizer_config.json there")
    return green("model", f"{folder}: config, weights and tokenizer are there")


def on_hub(name: str) -> Finding:
    """In the cache, or to be had."""
    if any(snapshot(name).glob("*/config.json")):
        return green("model", f"{name} is in the hub's cache")
    do = f"run `hf download {name}` where there is a network"
    if os.environ.get("HF_HUB_OFFLINE") in ("1", "true", "True"):
        return red("model", f"{name} is not in the cache and HF_HUB_OFFLINE is set", do)
    endpoint = os.environ.get("HF_ENDPOINT", "https://huggingface.co")
    token = value("HF_TOKEN")
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    try:
        answer = httpx.get(f"{endpoint}/api/models/{name}", headers=headers, timeout=TIMEOUT_S)
    except httpx.HTTPError:
        return red("model", f"{name} is not in the cache and {endpoint} cannot be reached", do)
    if answer.status_code in (401, 403, 404):
        return red(
            "model", f"the hub gives no {name} ({answer.status_code})", "check the name, or set HF_TOKEN in .env"
        )
    return green("model", f"{name} is on the hub")


def snapshot(name: str) -> Path:
    """Where the hub's cache keeps the snapshots of a model."""
    home = Path(os.environ.get("HF_HOME", Path.home() / ".cache" / "huggingface"))
    cache = Path(os.environ.get("HF_HUB_CACHE", home / "hub"))
    return cache / f"models--{name.replace('/', '--')}" / "snapshots"
