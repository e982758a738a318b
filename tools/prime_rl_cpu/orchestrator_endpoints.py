"""The embedded sampler plus the endpoints that only Prime-RL's orchestrator calls: weights, pauses, metrics.

Contract: each request is served by one policy version. vLLM continues a running request under new weights
(`/pause?mode=keep`); this server finishes the request first. Prime-RL retries 404 and 5xx, not 400.
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
from harbortrainer.engines.local.sampler.request_handler import RequestHandler
from harbortrainer.engines.local.sampler.requests import BadRequestError
from harbortrainer.engines.local.sampler.sampled_model import AdapterError, SampledAdapters

METRICS = {
    "num_requests_running": ("gauge", "Requests in the engine."),
    "num_requests_waiting": ("gauge", "Requests that wait for a weight update or a pause."),
    "kv_cache_usage_perc": ("gauge", "Share of the cache that running requests hold, 0 to 1."),
    "prompt_tokens_total": ("counter", "Tokens of finished prompts."),
    "generation_tokens_total": ("counter", "Tokens sampled."),
    "num_preemptions_total": ("counter", "Requests put back for lack of cache; not counted, always 0."),
}


class OrchestratorSampler(Sampler):
    """The embedded sampler with the orchestrator's endpoints."""

    async def _open(self) -> FastAPI:
        app = await super()._open()
        assert self._handler is not None
        add_endpoints(app, PolicyAdmin(self._handler, self._adapters))
        return app


class PolicyAdmin:
    """Loads adapters and weights into one engine, and pauses it."""

    def __init__(self, handler: RequestHandler, adapters: SampledAdapters) -> None:
        self.handler, self.engine, self.adapters = handler, handler.engine, adapters
        self._paused: AsyncExitStack | None = None

    async def load_adapter(self, folder: Path, name: str) -> None:
        """Load an adapter from a folder in peft's format; the folder's name gives the version."""
        config, state = await asyncio.to_thread(read_adapter, folder)
        await self.engine.update_weights(lambda used: self.adapters.load(state, config, used), self._version_of(folder))
        self._rename(name)

    async def unload_adapter(self, name: str) -> None:
        """Return to the base model, version 0."""
        if name not in self.handler.model_names[1:]:
            raise BadRequestError(f"The lora adapter '{name}' cannot be found.", 404)
        await self.engine.update_weights(lambda used: None, 0)
        self._rename()

    async def update_weights(self, folder: str | None) -> None:
        """Load full weights from a folder of safetensors."""
        if not folder:
            raise BadRequestError("weight_dir: this sampler reads weights from a folder; there is no broadcast")
        state = await asyncio.to_thread(read_weights, Path(folder))
        await self.engine.replace_weights(self._copier(state), self._version_of(Path(folder)))

    async def pause(self) -> None:
        """Hold new requests and wait until the running requests have finished."""
        if self._paused is None:
            self._paused = AsyncExitStack()
            await self._paused.enter_async_context(self.engine.gate.close())

    async def resume(self) -> None:
        """Admit requests again."""
        if self._paused is not None:
            paused, self._paused = self._paused, None
            await paused.aclose()

    def _rename(self, *adapters: str) -> None:
        self.handler.model_names[1:] = adapters

    def _version_of(self, folder: Path) -> int:
        numbers = re.findall(r"\d+", folder.name)
        return int(numbers[-1]) if numbers else self.engine.version + 1

    def _copier(self, state: dict[str, torch.Tensor]) -> Callable[[], None]:
        named = self.engine.model.named_parameters()
        weights = {name.replace(".base_layer.", "."): weight for name, weight in named if "lora_" not in name}
        unknown = sorted(state.keys() - weights.keys())
        missing = sorted(weights.keys() - state.keys())
        if unknown or missing:
            raise BadRequestError(
                f"weight_dir: not this model's weights ({len(unknown)} unknown, {len(missing)} missing)"
            )

        @torch.no_grad()
        def copy() -> None:
            for name, tensor in state.items():
                weights[name].copy_(tensor)

        return copy


def read_adapter(folder: Path) -> tuple[LoraConfig, dict[str, torch.Tensor]]:
    """Return the config and the tensors of an adapter in peft's format."""
    config = json.loads((folder / "adapter_config.json").read_text())
    if config.get("peft_type", "LORA") != "LORA":
        raise AdapterError(f"peft_type {config['peft_type']} is not LORA")
    return LoraConfig.from_peft_type(**config), load_file(folder / "adapter_model.safetensors")


def read_weights(folder: Path) -> dict[str, torch.Tensor]:
    """Return all tensors of a folder of safetensors."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise BadRequestError(f"weight_dir: no safetensors in {folder}", 404)
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def prometheus(stats: dict[str, float], model_name: str) -> str:
    """Return the text of `/metrics`, with vLLM's metric names where they exist."""
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


def add_endpoints(app: FastAPI, admin: PolicyAdmin) -> None:
    """Add the orchestrator's endpoints to the sampler's application."""
    _add_error_handlers(app)

    @app.get("/metrics")
    async def metrics() -> Response:
        return PlainTextResponse(prometheus(admin.engine.stats(), admin.handler.model_names[0]))

    @app.post("/load_lora_adapter")
    @app.post("/v1/load_lora_adapter")
    async def load_lora_adapter(request: Request) -> Response:
        body = await _string_fields(request, "lora_name", "lora_path")
        await admin.load_adapter(Path(body["lora_path"]), body["lora_name"])
        return JSONResponse({"status": "ok"})

    @app.post("/unload_lora_adapter")
    @app.post("/v1/unload_lora_adapter")
    async def unload_lora_adapter(request: Request) -> Response:
        await admin.unload_adapter((await _string_fields(request, "lora_name"))["lora_name"])
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
        await admin.update_weights((await _json_object(request)).get("weight_dir"))
        return JSONResponse({"status": "ok"})


def _add_error_handlers(app: FastAPI) -> None:
    async def bad_request(_: Request, error: Exception) -> Response:
        return error_response(str(error), 400)

    async def not_found(_: Request, error: Exception) -> Response:
        return error_response(str(error), 404)

    for kind in (AdapterError, SafetensorError, json.JSONDecodeError):
        app.add_exception_handler(kind, bad_request)
    app.add_exception_handler(FileNotFoundError, not_found)


async def _json_object(request: Request) -> dict:
    try:
        body = json.loads(await request.body())
    except json.JSONDecodeError as error:
        raise BadRequestError(f"body: not JSON ({error})") from error
    if not isinstance(body, dict):
        raise BadRequestError("body: not a JSON object")
    return body


async def _string_fields(request: Request, *names: str) -> dict[str, str]:
    body = await _json_object(request)
    for name in names:
        if not isinstance(body.get(name), str) or not body[name]:
            raise BadRequestError(f"{name}: a string is needed")
    return body
