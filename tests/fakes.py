"""Shared fakes for tests and benchmarks: a scripted model server and small Harbor tasks."""

import asyncio
import json
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aiohttp import web

DONE = json.dumps({"analysis": "done", "plan": "none", "commands": [], "task_complete": True})


def keys(*commands: str, duration: float = 0.1, complete: bool = False) -> str:
    """Return a Terminus-2 answer that types `commands`, each followed by Enter."""
    return json.dumps(
        {
            "analysis": "a",
            "plan": "p",
            "commands": [{"keystrokes": f"{command}\n", "duration": duration} for command in commands],
            "task_complete": complete,
        }
    )


@dataclass(kw_only=True)
class Reply:
    """One scripted answer.

    Args:
        content: The text; empty with an `error`.
        reasoning: The reasoning that comes with it.
        cut: Whether finish_reason is "length".
        status: HTTP status; any other than 200 sends `error`.
        error: Message of an error response.
        delay_s: Seconds to wait before answering.
    """

    content: str = ""
    reasoning: str | None = None
    cut: bool = False
    status: int = 200
    error: str = ""
    delay_s: float = 0.0


type Scripted = str | Reply | Callable[[dict[str, Any]], Awaitable[str | Reply]]


@dataclass
class ScriptedModel:
    """An OpenAI-compatible server that answers with the lines of a script, repeating the last one.

    With `return_token_ids` it returns one token id per UTF-8 byte and -0.5 as every log-probability.

    Example:
        async with ScriptedModel([keys("echo hi"), DONE, DONE]).serve() as model:
            TrialSpec(..., model=ModelEndpoint(name="scripted", base_url=model.url))
    """

    script: list[Scripted]
    delay_s: float = 0.0
    requests: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    url: str = ""

    @asynccontextmanager
    async def serve(self) -> AsyncGenerator["ScriptedModel"]:
        """Listen on a free port of this machine while the block runs."""
        app = web.Application()
        app.router.add_post("/v1/chat/completions", self._answer)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        host, port = runner.addresses[0][:2]
        self.url = f"http://{host}:{port}/v1"
        try:
            yield self
        finally:
            await runner.cleanup()

    async def _answer(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.requests.append(body)
        self.headers.append(dict(request.headers))
        line = self.script[min(_turn_of(body), len(self.script) - 1)]
        reply = line if isinstance(line, str | Reply) else await line(body)
        reply = Reply(content=reply) if isinstance(reply, str) else reply
        await asyncio.sleep(reply.delay_s or self.delay_s)
        if reply.status != 200:
            return web.json_response({"error": {"message": reply.error}}, status=reply.status)
        return web.json_response(_completion(body, reply))


def _turn_of(body: dict[str, Any]) -> int:
    """Return the turn from the conversation itself, so that one server serves concurrent trials."""
    return sum(message["role"] == "assistant" for message in body["messages"])


def _completion(body: dict[str, Any], reply: Reply) -> dict[str, Any]:
    prompt = list("".join(str(message["content"]) for message in body["messages"]).encode())
    sampled = list((reply.content + (reply.reasoning or "")).encode())
    choice: dict[str, Any] = {
        "index": 0,
        "message": {"role": "assistant", "content": reply.content},
        "finish_reason": "length" if reply.cut else "stop",
    }
    if reply.reasoning is not None:
        choice["message"]["reasoning_content"] = reply.reasoning
    completion = {
        "id": "scripted",
        "object": "chat.completion",
        "created": 0,
        "model": body["model"],
        "choices": [choice],
        "usage": {
            "prompt_tokens": len(prompt),
            "completion_tokens": len(sampled),
            "total_tokens": len(prompt) + len(sampled),
        },
    }
    if body.get("return_token_ids"):
        completion["prompt_token_ids"] = prompt
        choice["token_ids"] = sampled
        content = [{"token": f"token_id:{i}", "logprob": -0.5, "top_logprobs": []} for i in sampled]
        choice["logprobs"] = {"content": content}
    return completion


WRITES_ONE = "echo 1 > /logs/verifier/reward.txt"
SOLVED = "test -f /app/answer && echo 1 > /logs/verifier/reward.txt || echo 0 > /logs/verifier/reward.txt"


def make_task(
    folder: Path,
    *,
    test: str = SOLVED,
    steps: dict[str, str] | None = None,
    agent_timeout_s: float = 20,
    verifier_timeout_s: float = 20,
    extra: str = "",
    dockerfile: str = "FROM debian:12-slim\nWORKDIR /app\n",
    compose: str = "",
) -> Path:
    """Write a Harbor task in which the agent must create /app/answer.

    Args:
        folder: The task's folder, which is created.
        test: Body of tests/test.sh.
        steps: For a multi-step task, the body of test.sh by step name.
        agent_timeout_s: Agent timeout of each step.
        verifier_timeout_s: Verifier timeout of each step.
        extra: Further lines of task.toml.
        dockerfile: Content of environment/Dockerfile.
        compose: Content of environment/docker-compose.yaml; "" for none.
    """
    (folder / "environment").mkdir(parents=True)
    (folder / "environment" / "Dockerfile").write_text(dockerfile)
    if compose:
        (folder / "environment" / "docker-compose.yaml").write_text(compose)
    toml = f"[verifier]\ntimeout_sec = {verifier_timeout_s}\n[agent]\ntimeout_sec = {agent_timeout_s}\n{extra}\n"
    if steps is None:
        _write(folder / "instruction.md", "Create the file /app/answer.\n")
        _write(folder / "tests" / "test.sh", f"#!/bin/bash\n{test}\n")
        _write(folder / "solution" / "solve.sh", "#!/bin/bash\ntouch /app/answer\n")
    for name, body in (steps or {}).items():
        toml += (
            f'[[steps]]\nname = "{name}"\n'
            f"[steps.agent]\ntimeout_sec = {agent_timeout_s}\n"
            f"[steps.verifier]\ntimeout_sec = {verifier_timeout_s}\n"
        )
        _write(folder / "steps" / name / "instruction.md", f"Step {name}: create the file /app/answer.\n")
        _write(folder / "steps" / name / "tests" / "test.sh", f"#!/bin/bash\n{body}\n")
    _write(folder / "task.toml", toml)
    return folder


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
