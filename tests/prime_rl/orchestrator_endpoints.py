"""The embedded sampler with the endpoints that only Prime-RL's orchestrator calls: weights, pauses, metrics.

Contract: one request is one policy version. Where vLLM would let a running request go on under new weights
(`/pause?mode=keep`), this server lets it end first. Prime-RL retries 404 and 5xx, not 400.
"""

import asyncio
import json
import re
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path

import torch
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from peft import LoraConfig
from safetensors import SafetensorError
from safetensors.torch import load_file

from harbortrainer.engines.local.sampler import Sampler
from harbortrainer.engines.local.sampler.http_server import error_response
from harbortrainer.engines.local.sampler.replies import Replies
from harbortrainer.engines.local.sampler.requests import BadRequestError
from harbortrainer.engines.local.sampler.sampled_model import AdapterError, SampledAdapters

METRICS = {
    "num_requests_running": ("gauge", "Requests in the engine."),
    "num_requests_waiting": ("gauge", "Requests that wait for a hand-over or a pause."),
    "kv_cache_usage_perc": ("gauge", "Share of the cache that running requests hold, 0 to 1."),
    "prompt_tokens_total": ("counter", "Tokens of finished prompts."),
    "generation_tokens_total": ("counter", "Tokens sampled."),
    "num_preemptions_total": ("counter", "Requests put back for lack of cache; not counted, always 0."),
}


class OrchestratorSampler(Sampler):
    """A sampler that Prime-RL's orchestrator can work with."""

    async def _open(self) -> FastAPI:
        app = await super()._open()
        assert self._replies is not None
        add_endpoints(app, Administration(self._replies, self._adapters))
        return app


class Administration:
    """Changes the policy of one engine."""

    def __init__(self, replies: Replies, adapters: SampledAdapters) -> None:
        self.replies, self.engine, self.adapters = replies, replies.engine, adapters
        self._paused: AsyncExitStack | None = None

    async def load_adapter(self, folder: Path, name: str) -> None:
        """Hands over an adapter from a folder in peft's format; the version is read off its name."""
        config, state = await asyncio.to_thread(read_adapter, folder)
        await self.engine.hand_over(lambda used: self.adapters.load(state, config, used), self._version_of(folder))
        self._rename(name)

    async def unload_adapter(self, name: str) -> None:
        """Back to the base model, version 0."""
        if name not in self.replies.model_names[1:]:
            raise BadRequestError(f"The lora adapter '{name}' cannot be found.", 404)
        await self.engine.hand_over(lambda used: None, 0)
        self._rename()

    async def update_weights(self, folder: str | None) -> None:
        """Hands over full weights from a folder of safetensors."""
        if not folder:
            raise BadRequestError("weight_dir: this sampler reads weights from a folder; there is no broadcast")
        state = await asyncio.to_thread(read_weights, Path(folder))
        await self.engine.swap(self._copier(state), self._version_of(Path(folder)))

    async def pause(self) -> None:
        """Keeps new requests waiting, and returns when the running ones have ended."""
        if self._paused is None:
            self._paused = AsyncExitStack()
            await self._paused.enter_async_context(self.engine.gate.shut())

    async def resume(self) -> None:
        """Lets requests in again."""
        if self._paused is not None:
            paused, self._paused = self._paused, None
            await paused.aclose()

    def _rename(self, *adapters: str) -> None:
        self.replies.model_names[1:] = adapters

    def _version_of(self, folder: Path) -> int:
        numbers = re.findall(r"\d+", folder.name)
        return int(numbers[-1]) if numbers else self.engine.version + 1

    def _copier(self, state: dict[str, torch.Tensor]) -> Callable[[], None]:
        named = self.engine.model.named_parameters()
        own = {name.replace(".base_layer.", "."): weight for name, weight in named if "lora_" not in name}
        odd = sorted(state.keys() - own.keys())
        missing = sorted(own.keys() - state.keys())
        if odd or missing:
            raise BadRequestError(f"weight_dir: not this model's weights ({len(odd)} unknown, {len(missing)} missing)")

        @torch.no_grad()
        def copy() -> None:
            for name, tensor in state.items():
                own[name].copy_(tensor)

        return copy


def read_adapter(folder: Path) -> tuple[LoraConfig, dict[str, torch.Tensor]]:
    """Reads peft's two files."""
    config = json.loads((folder / "adapter_config.json").read_text())
    if config.get("peft_type", "LORA") != "LORA":
        raise AdapterError(f"peft_type {config['peft_type']} is not LORA")
    return LoraConfig.from_peft_type(**config), load_file(folder / "adapter_model.safetensors")


def read_weights(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a folder of safetensors."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise BadRequestError(f"weight_dir: no safetensors in {folder}", 404)
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def prometheus(stats: dict[str, float], model_name: str) -> str:
    """The text of `/metrics`, under vLLM's names where there is one."""
    values = {
        "num_requests_running": stats["running"],
        "num_requests_waiting": stats["waiting"],
        "kv_cache_usage_perc": min(1.0, stats["cache_used_tokens"] / max(1, stats["cache_tokens"])),
        "prompt_tokens_total": stats["prompt_tokens"],
        "generation_tokens_total": stats["sampled_tokens"],
        "num_preemptions_total": 0,
    }
    escaped = model_name.replace("\\", "\\\\").replace('"', '\\"')
    labels = f'{{engine="0",model_name="{escaped}"}}'
    lines = []
    for name, value in values.items():
        kind, text = METRICS[name]
        family = f"vllm:{name}"
        lines += [f"# HELP {family} {text}", f"# TYPE {family} {kind}", f"{family}{labels} {value}"]
    lines += [
        "# HELP vllm:cache_config_info Size of the cache.",
        "# TYPE vllm:cache_config_info gauge",
        f'vllm:cache_config_info{{engine="0",kv_cache_size_tokens="{int(stats["cache_tokens"])}"}} 1',
        "# HELP harbortrainer_policy_version The policy version that samples now.",
        "# TYPE harbortrainer_policy_version gauge",
        f"harbortrainer_policy_version {int(stats['version'])}",
    ]
    return "\n".join(lines) + "\n"


def add_endpoints(app: FastAPI, admin: Administration) -> None:
    """Adds what the orchestrator calls to the sampler's application."""
    _add_refusals(app)

    @app.get("/metrics")
    async def metrics() -> Response:
        return PlainTextResponse(prometheus(admin.engine.stats(), admin.replies.model_names[0]))

    @app.post("/load_lora_adapter")
    @app.post("/v1/load_lora_adapter")
    async def load_lora_adapter(request: Request) -> Response:
        asked = await _fields(request, "lora_name", "lora_path")
        await admin.load_adapter(Path(asked["lora_path"]), asked["lora_name"])
        return JSONResponse({"status": "ok"})

    @app.post("/unload_lora_adapter")
    @app.post("/v1/unload_lora_adapter")
    async def unload_lora_adapter(request: Request) -> Response:
        await admin.unload_adapter((await _fields(request, "lora_name"))["lora_name"])
        return JSONResponse({"status": "ok"})

    @app.post("/pause")
    async def pause() -> Response:
        await admin.pause()
        return JSONResponse({"status": "paused"})

    @app.post("/resume")
    async def resume() -> Response:
        await admin.resume()
        return JSONResponse({"status": "resumed"})

    @app.post("/update_weights")
    async def update_weights(request: Request) -> Response:
        await admin.update_weights((await _object(request)).get("weight_dir"))
        return JSONResponse({"status": "ok"})


def _add_refusals(app: FastAPI) -> None:
    async def refused(_: Request, error: Exception) -> Response:
        return error_response(str(error), 400)

    async def missing(_: Request, error: Exception) -> Response:
        return error_response(str(error), 404)

    for kind in (AdapterError, SafetensorError, json.JSONDecodeError):
        app.add_exception_handler(kind, refused)
    app.add_exception_handler(FileNotFoundError, missing)


async def _object(request: Request) -> dict:
    try:
        asked = json.loads(await request.body())
    except json.JSONDecodeError as error:
        raise BadRequestError(f"body: not JSON ({error})") from error
    if not isinstance(asked, dict):
        raise BadRequestError("body: not a JSON object")
    return asked


async def _fields(request: Request, *names: str) -> dict[str, str]:
    asked = await _object(request)
    for name in names:
        if not isinstance(asked.get(name), str) or not asked[name]:
            raise BadRequestError(f"{name}: a string is needed")
    return asked
