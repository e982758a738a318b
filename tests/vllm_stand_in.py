"""A stand-in for vLLM: our own sampler in a separate process, with `vllm serve`'s command line and API.

    vllm --version
    vllm serve MODEL --uds PATH --enable-lora ...

Tokens and log-probabilities are real. It supports only the options and endpoints that the project uses.

It is as strict as vLLM:

- An unknown option ends the program.
- Adapters are loaded only if `VLLM_ALLOW_RUNTIME_LORA_UPDATING` is True.
- A request with an unknown adapter name gets a 404.

Its sampler holds one policy at a time, so requests to another policy wait.

Environment variables:

- `STAND_IN_VERSION`: its release. From 0.30 on, token ids need `--enable-scale-out`, which earlier releases lack.
- `STAND_IN_FAULT`: a defect.
    - `dies`: exits before it listens.
    - `stale`: always samples with the base.
    - `silent`: returns no prompt log-probabilities.
    - `unfit`: refuses every adapter.
"""

import argparse
import asyncio
import os
import re
import sys
from collections import Counter
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

FAULT = os.environ.get("STAND_IN_FAULT", "")
VERSION = os.environ.get("STAND_IN_VERSION", "0.26.0+cu129")


def write_stand_in(folder: Path) -> Path:
    """Write a program `vllm` to a folder, which a test adds to the PATH."""
    folder.mkdir(parents=True, exist_ok=True)
    program = folder / "vllm"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} {Path(__file__).resolve()} "$@"\n')
    program.chmod(0o755)
    return folder


def needs_scale_out(version: str) -> bool:
    """Whether this release needs `--enable-scale-out` for token ids."""
    number = re.match(r"(\d+)\.(\d+)", version)
    return number is not None and (int(number[1]), int(number[2])) >= (0, 30)


def parse_options(arguments: list[str], version: str = VERSION) -> argparse.Namespace:
    """Parse the options of `vllm serve`, as the given release does."""
    parser = argparse.ArgumentParser(prog="vllm serve", allow_abbrev=False)
    parser.add_argument("model")
    parser.add_argument("--enable-lora", action="store_true")
    parser.set_defaults(enable_scale_out=not needs_scale_out(version))
    if needs_scale_out(version):
        parser.add_argument("--enable-scale-out", action="store_true")
    parser.add_argument("--lora-target-modules", nargs="+", required=True)
    for name in ("uds", "dtype", "generation-config"):
        parser.add_argument(f"--{name}", required=True)
    for name in ("max-model-len", "max-lora-rank", "max-loras", "max-cpu-loras", "seed"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--gpu-memory-utilization", type=float, required=True)
    parser.add_argument("--logprobs-mode", choices=["processed_logprobs"], required=True)
    parser.add_argument("--uvicorn-log-level", choices=["warning"], required=True)
    return parser.parse_args(arguments)


class PolicyLock:
    """Allows requests to one policy at a time; loads another policy when no request is running."""

    def __init__(self, sampler, options: argparse.Namespace) -> None:
        self.sampler, self.options = sampler, options
        self.adapters: dict = {}
        """Loaded adapters by name: config and weights, read at loading since the files may be removed later."""
        self.loaded: str | None = None
        self.running: Counter[str] = Counter()
        self.changed = asyncio.Condition()

    @asynccontextmanager
    async def hold(self, name: str) -> AsyncGenerator[None]:
        """Wait until the policy is loaded, and keep it loaded."""
        async with self.changed:
            await self.changed.wait_for(lambda: self.loaded == name or not self.running.total())
            if self.loaded != name:
                await asyncio.to_thread(self.load, name)
                self.loaded = name
            self.running[name] += 1
        try:
            yield
        finally:
            self.running[name] -= 1
            async with self.changed:
                self.changed.notify_all()

    def load(self, name: str) -> None:
        if not self.adapters:
            return  # only the base was ever requested
        config, weights = self.adapters.get(name) or next(iter(self.adapters.values()))
        if name not in self.adapters or FAULT == "stale":
            weights = {key: tensor * 0 for key, tensor in weights.items()}
        self.sampler.load_adapter(weights, 1, config=config)


def build_app(lock: PolicyLock):
    import httpx
    from fastapi import FastAPI, Request
    from fastapi.responses import JSONResponse, Response
    from peft import LoraConfig
    from safetensors.torch import load_file

    app, sampler, options = FastAPI(), lock.sampler, lock.options
    key = {"Authorization": f"Bearer {sampler.api_key}"}
    sampler_client = httpx.AsyncClient(base_url=sampler.url, timeout=None, headers=key)

    @app.get("/health")
    async def health() -> Response:
        return Response()

    @app.post("/inference/v1/generate")
    async def generate(request: Request) -> Response:
        if not options.enable_scale_out:
            return JSONResponse({"error": {"message": "Scale-out endpoints are disabled.", "code": 403}}, 403)
        body = await request.json()
        name = body.pop("model")
        if name != options.model and name not in lock.adapters:
            return JSONResponse({"error": {"message": f"The model `{name}` does not exist.", "code": 404}}, 404)
        params = body["sampling_params"]
        assert {"temperature", "logprobs", "max_tokens"} <= params.keys(), params
        prompt_logprobs_option = params.pop("prompt_logprobs", None)
        async with lock.hold(name):
            reply = await sampler_client.post("/inference/v1/generate", json=body)
            content = reply.json()
            if prompt_logprobs_option is not None and FAULT != "silent":
                content["prompt_logprobs"] = await asyncio.to_thread(prompt_logprobs, sampler, body["token_ids"])
        return JSONResponse(content, reply.status_code)

    @app.post("/v1/load_lora_adapter")
    async def load_lora_adapter(request: Request) -> Response:
        body = await request.json()
        folder = Path(body["lora_path"])
        if os.environ.get("VLLM_ALLOW_RUNTIME_LORA_UPDATING") != "True" or not options.enable_lora:
            return JSONResponse({"detail": "Not Found"}, 404)
        if body["lora_name"] in lock.adapters or FAULT == "unfit":
            return JSONResponse({"error": {"message": f"{body['lora_name']} is not taken", "code": 400}}, 400)
        config = LoraConfig.from_pretrained(str(folder))
        assert config.r <= options.max_lora_rank
        assert {name.rpartition(".")[2] for name in config.target_modules} <= set(options.lora_target_modules)
        lock.adapters[body["lora_name"]] = config, load_file(folder / "adapter_model.safetensors")
        return Response("Success: LoRA adapter added successfully.")

    return app


def prompt_logprobs(sampler, token_ids: list[int]) -> list:
    """Return `prompt_logprobs` in vLLM's format: per position, only the prompt token's; None for the first."""
    from harbortrainer.engines.local.sampler.rescoring import SampledSequence, rescore
    from harbortrainer.engines.peft_internals import use_adapter

    positions = list(range(1, len(token_ids)))
    prompt = SampledSequence("", 0, 1.0, list(token_ids), positions, [0.0] * len(positions))
    with use_adapter(sampler._handler.engine.policy.adapter):
        (scored,) = rescore(sampler.model, [prompt])
    logprobs = [{str(token_ids[t]): {"logprob": nats}} for t, nats in zip(positions, scored.recomputed, strict=True)]
    return [None, *logprobs]


async def serve(options: argparse.Namespace) -> None:
    import uvicorn

    from harbortrainer.engines.local.sampler import Sampler

    sampler = Sampler(
        options.model, device="cpu", dtype=options.dtype, max_model_len=options.max_model_len, seed=options.seed
    )
    with sampler:
        lock = PolicyLock(sampler, options)
        config = uvicorn.Config(build_app(lock), uds=options.uds, log_level="warning", timeout_graceful_shutdown=1)
        await uvicorn.Server(config).serve()


def main(arguments: list[str]) -> None:
    if arguments == ["--version"]:
        print("INFO 11-22 05:39:37 [__init__.py:1] Automatically detected platform cpu.")
        print(VERSION)
        return
    assert arguments[0] == "serve"
    options = parse_options(arguments[1:])
    if FAULT == "dies":
        print("ValueError: Free memory on device is less than desired GPU memory utilization", file=sys.stderr)
        sys.exit(1)
    import torch

    torch.set_num_threads(1)
    asyncio.run(serve(options))


if __name__ == "__main__":
    main(sys.argv[1:])
