"""Weights and pauses: what a trainer, or Prime-RL's orchestrator, tells the server.

Contract: one request is one policy version. Where vLLM would let a running request go on under new weights
(`/pause?mode=keep`), this server lets it end first.
"""

import asyncio
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig
from safetensors import SafetensorError
from safetensors.torch import load_file

from harbortrainer.engines.local.sampler.adapter import NAME, Adapter, AdapterError, read_adapter
from harbortrainer.engines.local.sampler.engine import Engine
from harbortrainer.engines.local.sampler.serving import Serving
from harbortrainer.engines.local.sampler.wire import BadRequestError


@dataclass
class Admin:
    """Changes the policy of one engine."""

    engine: Engine
    serving: Serving
    adapter: Adapter = field(init=False)

    def __post_init__(self) -> None:
        self.adapter = Adapter(self.engine.model)

    async def load_state(
        self, state: Mapping[str, torch.Tensor], version: int, config: LoraConfig | Mapping[str, Any] | None
    ) -> float:
        """Hands over an adapter's weights; returns the seconds nothing was sampled."""
        return await self.engine.swap(lambda: self.adapter.load(state, config), version)

    async def load_folder(self, folder: str | Path, version: int | None = None, name: str | None = None) -> float:
        """Hands over an adapter from a folder in peft's format; the version is read off its name when not given."""
        config, state = await asyncio.to_thread(read_adapter, folder)
        version = self._version_of(Path(folder)) if version is None else version
        seconds = await self.load_state(state, version, config)
        if name is not None:
            self.serving.adapter_name = name
        return seconds

    async def unload(self) -> None:
        """Back to the base model, version 0."""
        await self.engine.swap(self.adapter.clear, 0)
        self.serving.adapter_name = None

    async def update_weights(self, folder: str | None) -> None:
        """Hands over full weights from a folder of safetensors."""
        if not folder:
            raise BadRequestError("weight_dir: this sampler reads weights from a folder; there is no broadcast")
        state = await asyncio.to_thread(_read_weights, Path(folder))
        await self.engine.swap(self._copier(state), self._version_of(Path(folder)))

    async def pause(self) -> None:
        """Keeps new requests waiting, and returns when the running ones have ended."""
        await self.engine.gate.shut("pause")

    async def resume(self) -> None:
        await self.engine.gate.lift("pause")

    def _version_of(self, folder: Path) -> int:
        numbers = re.findall(r"\d+", folder.name)
        return int(numbers[-1]) if numbers else self.engine.version + 1

    def _copier(self, state: dict[str, torch.Tensor]) -> Callable[[], None]:
        model = self.engine.model
        own = {n.replace(".base_layer.", "."): p for n, p in model.named_parameters() if f".{NAME}." not in n}
        odd = sorted(state.keys() - own.keys())
        missing = sorted(own.keys() - state.keys())
        if odd or missing:
            raise BadRequestError(f"weight_dir: not this model's weights ({len(odd)} unknown, {len(missing)} missing)")

        def copy() -> None:
            with torch.no_grad():
                for name, tensor in state.items():
                    own[name].copy_(tensor)

        return copy


def _read_weights(folder: Path) -> dict[str, torch.Tensor]:
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise BadRequestError(f"weight_dir: no safetensors in {folder}", 404)
    state: dict[str, torch.Tensor] = {}
    for file in files:
        state.update(load_file(file))
    return state


def admin_status(error: Exception) -> int | None:
    """The HTTP status a failed change of weights is answered with; Prime-RL retries 404 and 5xx, not 400."""
    if isinstance(error, FileNotFoundError):
        return 404
    if isinstance(error, AdapterError | SafetensorError | json.JSONDecodeError):
        return 400
    return None
