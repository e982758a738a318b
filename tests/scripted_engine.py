"""A model server with scripted answers: real HTTP, real token ids, predictable log-probabilities.

It has the endpoint of the interception path (/inference/v1/generate) and the one for agents that call it directly
(/v1/chat/completions with `prompt_token_ids` and `token_ids`). Both use the same renderer. It records its answers.
It does not use torch, and runs in a thread of its own, so other processes can call it too.
"""

import asyncio
import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

from aiohttp import web
from tiny_model import build_tiny_tokenizer

if TYPE_CHECKING:
    from renderers import RendererConfig

THINKING_TEMPLATE = (
    "{%- for message in messages %}{{ '<|im_start|>' + message.role + '\n' }}"
    "{%- if message.reasoning_content %}{{ '<think>' + message.reasoning_content + '</think>' }}{%- endif %}"
    "{{ (message.content or '') + '<|im_end|>' + '\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{%- endif %}"
)


@dataclass(frozen=True)
class Answer:
    """One scripted answer."""

    text: str = ""
    cut: bool = False
    """Whether it ends with finish_reason "length" and without the end token."""
    status: int = 200
    """HTTP status; an error has no answer."""
    message: str = "the engine is down"
    """The error's text."""
    delay_s: float = 0.0
    """Seconds before the answer."""
    defect: str = ""
    """Defect of a chat completion: no "ids", no "logprobs", one "logprob" missing, or a "number" that is NaN."""


@dataclass(frozen=True)
class Sampled:
    """The tokens of one call."""

    session: str | None
    prompt_ids: list[int]
    token_ids: list[int]
    logprobs: list[float]


Script = Callable[[str], Answer]


def by_turn(answers: Sequence[Answer | str]) -> Script:
    """Return a script that gives the n-th answer in the n-th turn, and then repeats the last one."""

    def script(prompt: str) -> Answer:
        turn = prompt.count("<|im_start|>assistant") - 1
        answer = answers[min(turn, len(answers) - 1)]
        return Answer(answer) if isinstance(answer, str) else answer

    return script


def save_tokenizer(folder: Path, *, thinking: bool = False) -> Path:
    """Save a tokenizer with a chat template; with `thinking` the template keeps reasoning in the history."""
    tokenizer = build_tiny_tokenizer()
    if thinking:
        tokenizer.chat_template = THINKING_TEMPLATE
    tokenizer.save_pretrained(folder)
    return folder


def expected_logprobs(prompt_ids: list[int], token_ids: list[int]) -> list[float]:
    """Return the log-probability of each answer token, a function of its position and id."""
    start = len(prompt_ids)
    return [-((start + i) * 31 + token % 97 + 1) / 1e5 for i, token in enumerate(token_ids)]


@dataclass
class ScriptedEngine:
    """The server, as a context manager. `url` has no /v1; `samples` lists the calls in order."""

    tokenizer_dir: Path
    script: Script
    model: str = "scripted"
    max_model_len: int = 100_000
    refused_keys: tuple[str, ...] = ()
    """Keys of a chat completion's body that are refused with 400, as by a provider that does not support them."""
    splits_reasoning: bool = True
    """Whether chat completions separate reasoning from content, like a server with a reasoning parser."""
    processed_logprobs: bool = True
    """Whether log-probabilities are those of the sampled distribution, as with vLLM's `--logprobs-mode`."""
    format: "RendererConfig | None" = None
    """The chat format; by default the tokenizer's own template."""
    samples: list[Sampled] = field(default_factory=list)
    url: str = ""

    def __post_init__(self) -> None:
        from renderers import DefaultRendererConfig, create_renderer
        from renderers.base import load_tokenizer

        self.tokenizer = load_tokenizer(str(self.tokenizer_dir))
        self.format = self.format or DefaultRendererConfig()
        self.renderer = create_renderer(self.tokenizer, self.format)
        self.calls = self.model_list_calls = self.logprob_probes = 0
        self.called = threading.Event()
        self.requests: list[dict] = []

    def __enter__(self) -> Self:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._start(), self._loop).result(10)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        asyncio.run_coroutine_threadsafe(self._stop(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)

    async def _start(self) -> None:
        app = web.Application(client_max_size=1 << 26)
        app.router.add_routes(self.routes())
        self._runner = web.AppRunner(app, shutdown_timeout=0.2)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        host, port = self._runner.addresses[0][:2]
        self.url = f"http://{host}:{port}"

    def routes(self) -> list[web.RouteDef]:
        """Return the server's routes."""
        return [
            web.post("/inference/v1/generate", self._generate),
            web.post("/v1/chat/completions", self._chat),
            web.get("/v1/models", self._models),
            web.get("/health", self._health),
        ]

    async def _stop(self) -> None:
        await self._runner.cleanup()
        pending = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in pending:
            task.cancel()
        await asyncio.gather(*pending, return_exceptions=True)

    async def _health(self, request: web.Request) -> web.Response:
        return web.json_response({})

    async def _models(self, request: web.Request) -> web.Response:
        self.model_list_calls += 1
        return web.json_response({"data": [{"id": self.model, "max_model_len": self.max_model_len}]})

    async def _generate(self, request: web.Request) -> web.Response:
        body = await request.json()
        answer = await self._answer(body, body["token_ids"])
        if answer.status != 200:
            return _refusal(answer)
        sampled = self._sample(request.headers.get("X-Session-ID"), body["token_ids"], answer)
        choice = _choice(sampled, answer) | {"token_ids": sampled.token_ids, "weight_versions": _two_versions(sampled)}
        if (candidates := body["sampling_params"].get("logprobs", 1)) > 1:
            _add_candidates(choice, sampled, candidates)
        return web.json_response({"request_id": str(self.calls), "choices": [choice]})

    async def _chat(self, request: web.Request) -> web.Response:
        body = await request.json()
        if unknown := [key for key in self.refused_keys if key in body]:
            return _refusal(Answer(status=400, message=f"Unrecognized request argument supplied: {unknown[0]}"))
        if body.get("top_k") == 1:
            self.logprob_probes += 1
            greedy = {"token": "x", "logprob": 0.0 if self.processed_logprobs else -0.5}
            return web.json_response({"choices": [{"logprobs": {"content": [greedy]}}]})
        prompt_ids = self.renderer.render_ids(body["messages"], add_generation_prompt=True)
        answer = await self._answer(body, prompt_ids)
        if answer.status != 200:
            return _refusal(answer)
        sampled = self._sample(None, prompt_ids, answer)
        parsed = self.renderer.parse_response(sampled.token_ids)
        message = {"role": "assistant", "content": parsed.content}
        if not self.splits_reasoning:
            message["content"] = answer.text
        elif parsed.reasoning_content:
            message["reasoning_content"] = parsed.reasoning_content
        choice = _choice(sampled, answer) | {"message": message}
        head = {"id": f"chatcmpl-{self.calls}", "object": "chat.completion", "created": 0}
        usage = {"prompt_tokens": len(prompt_ids), "completion_tokens": len(sampled.token_ids)}
        usage["total_tokens"] = sum(usage.values())
        reply = head | {"choices": [choice], "usage": usage, "model": body["model"]}
        if body.get("return_token_ids"):
            reply["prompt_token_ids"], choice["token_ids"] = prompt_ids, sampled.token_ids
        return web.json_response(_with_defect(reply, answer.defect))

    async def _answer(self, body: dict, prompt_ids: list[int]) -> Answer:
        self.calls += 1
        self.called.set()
        self.requests.append(body)
        if len(prompt_ids) > self.max_model_len:
            return Answer(status=400, message=f"This model's maximum context length is {self.max_model_len} tokens")
        answer = self.script(self.tokenizer.decode(prompt_ids))
        await asyncio.sleep(answer.delay_s)
        return answer

    def _sample(self, session: str | None, prompt_ids: list[int], answer: Answer) -> Sampled:
        token_ids = self.tokenizer.encode(answer.text, add_special_tokens=False)
        if not answer.cut:
            token_ids.append(self.tokenizer.eos_token_id)
        sampled = Sampled(session, list(prompt_ids), token_ids, expected_logprobs(prompt_ids, token_ids))
        self.samples.append(sampled)
        return sampled


def _choice(sampled: Sampled, answer: Answer) -> dict:
    content = [
        {"token": f"token_id:{token}", "logprob": logprob, "bytes": None, "top_logprobs": []}
        for token, logprob in zip(sampled.token_ids, sampled.logprobs, strict=True)
    ]
    finish = "length" if answer.cut else "stop"
    return {"index": 0, "finish_reason": finish, "logprobs": {"content": content}}


def _two_versions(sampled: Sampled) -> list[dict]:
    """Return vLLM's spans of an answer whose weights were updated after the first token."""
    spans = [("step-1", 0, 1), ("step-2", 1, len(sampled.token_ids))]
    return [{"version": name, "start": start, "end": end} for name, start, end in spans if start < end]


def _add_candidates(choice: dict, sampled: Sampled, count: int) -> None:
    """Add the most likely tokens of each position: the sampled one, and those with the next ids."""
    for entry, token in zip(choice["logprobs"]["content"], sampled.token_ids, strict=True):
        others = [{"token": f"token_id:{token + i}", "logprob": -10.0 - i} for i in range(1, count)]
        entry["top_logprobs"] = [{"token": entry["token"], "logprob": entry["logprob"]}, *others]


def _with_defect(reply: dict, defect: str) -> dict:
    choice = reply["choices"][0]
    if defect == "ids":
        choice.pop("token_ids")
        reply.pop("prompt_token_ids")
    elif defect == "logprobs":
        choice.pop("logprobs")
    elif defect == "logprob":
        choice["logprobs"]["content"].pop()
    elif defect == "number":
        choice["logprobs"]["content"][0]["logprob"] = math.nan
    return reply


def _refusal(answer: Answer) -> web.Response:
    return web.json_response({"error": {"message": answer.message, "code": answer.status}}, status=answer.status)
