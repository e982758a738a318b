"""The HTTP surface: which path is answered by what, and which error by which status.

Contract: a bad request is 400 (404 for an unknown model or missing files) with a one-line message; an engine that
failed is 500, and `/health` then is 503; a client that goes away frees its request's slot.
"""

import asyncio
import json
import time
from collections.abc import Coroutine
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from starlette.exceptions import HTTPException

from harbortrainer.engines.local.sampler.admin import Admin, admin_status
from harbortrainer.engines.local.sampler.engine import EngineFailedError
from harbortrainer.engines.local.sampler.metrics import prometheus
from harbortrainer.engines.local.sampler.serving import Serving
from harbortrainer.engines.local.sampler.wire import (
    BadRequestError,
    ChatRequest,
    GenerateRequest,
    error_body,
    parse,
)

SESSION_HEADER = "x-session-id"
_CLIENT_GONE = 499


def build_app(serving: Serving, admin: Admin) -> FastAPI:
    """The application for one engine."""
    app = FastAPI(openapi_url=None)
    _add_errors(app)
    _add_sampling(app, serving)
    _add_information(app, serving)
    _add_administration(app, admin)
    return app


def _add_sampling(app: FastAPI, serving: Serving) -> None:
    @app.post("/inference/v1/generate")
    async def generate(request: Request) -> Response:
        asked = parse(GenerateRequest, await request.body())
        return await _while_connected(request, serving.generate(asked, request.headers.get(SESSION_HEADER, "")))

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        asked = parse(ChatRequest, await request.body())
        return await _while_connected(request, serving.chat(asked, request.headers.get(SESSION_HEADER, "")))


def _add_information(app: FastAPI, serving: Serving) -> None:
    engine, started = serving.engine, int(time.time())

    @app.get("/health")
    @app.get("/liveness")
    async def health() -> Response:
        if engine.failure is not None:
            return _error(f"the engine has failed: {engine.failure}", 503)
        return _json({"status": "ok"})

    @app.get("/v1/models")
    async def models() -> Response:
        names = [serving.model_name] + ([serving.adapter_name] if serving.adapter_name else [])
        cards = [
            {
                "id": name,
                "object": "model",
                "created": started,
                "owned_by": "harbortrainer",
                "root": name,
                "parent": serving.model_name if name != serving.model_name else None,
                "max_model_len": engine.max_model_len,
            }
            for name in names
        ]
        return _json({"object": "list", "data": cards})

    @app.get("/metrics")
    async def metrics() -> Response:
        return PlainTextResponse(prometheus(engine, serving.model_name))

    @app.get("/version")
    async def version() -> Response:
        return _json({"policy_version": engine.version})


def _add_administration(app: FastAPI, admin: Admin) -> None:
    @app.post("/load_lora_adapter")
    @app.post("/v1/load_lora_adapter")
    async def load_lora_adapter(request: Request) -> Response:
        asked = await _fields(request, "lora_name", "lora_path")
        await admin.load_folder(asked["lora_path"], name=asked["lora_name"])
        return _json({"status": "ok"})

    @app.post("/unload_lora_adapter")
    @app.post("/v1/unload_lora_adapter")
    async def unload_lora_adapter(request: Request) -> Response:
        asked = await _fields(request, "lora_name")
        if asked["lora_name"] != admin.serving.adapter_name:
            raise BadRequestError(f"The lora adapter '{asked['lora_name']}' cannot be found.", 404)
        await admin.unload()
        return _json({"status": "ok"})

    @app.post("/pause")
    async def pause() -> Response:
        await admin.pause()
        return _json({"status": "paused"})

    @app.post("/resume")
    async def resume() -> Response:
        await admin.resume()
        return _json({"status": "resumed"})

    @app.post("/update_weights")
    async def update_weights(request: Request) -> Response:
        await admin.update_weights((await _object(request)).get("weight_dir"))
        return _json({"status": "ok"})


def _add_errors(app: FastAPI) -> None:
    @app.exception_handler(HTTPException)
    async def http(_: Request, error: HTTPException) -> Response:
        return _error(str(error.detail), error.status_code)

    @app.exception_handler(BadRequestError)
    async def bad(_: Request, error: BadRequestError) -> Response:
        return _error(str(error), error.status)

    @app.exception_handler(EngineFailedError)
    async def failed(_: Request, error: EngineFailedError) -> Response:
        return _error(str(error), 500)

    async def refused(_: Request, error: Exception) -> Response:
        return _error(str(error), admin_status(error) or 500)

    app.add_exception_handler(ValueError, refused)
    app.add_exception_handler(FileNotFoundError, refused)


async def _while_connected(request: Request, work: Coroutine[Any, Any, dict[str, Any]]) -> Response:
    """Does the work, and drops it when the client goes away first."""
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return _json(working.result())
        return Response(status_code=_CLIENT_GONE)
    finally:
        leaving.cancel()
        working.cancel()


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _object(request: Request) -> dict[str, Any]:
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


def _json(content: dict[str, Any], status: int = 200) -> Response:
    return JSONResponse(content, status)


def _error(message: str, status: int) -> Response:
    return _json(error_body(message, status), status)
