"""A model server with one path per fault, `{url}/{fault}/v1`: faults seen in training runs, over real HTTP.

A fault is a name in `FAULTS`. All other requests are answered by the script.
"""

import asyncio
import contextlib
import json
import time
from dataclasses import dataclass, field

from aiohttp import web
from reply_mutations import mutated
from scripted_engine import ScriptedEngine
from verifiers.v1.clients import TrainClientConfig

ERRORS = {"answers-500": 500, "answers-429": 429}
INVALID_REPLIES = ("no-json", "no-choices", "a-logprob-too-few", "logprob-of-5", "negative-id")
FAULTS = ("silent", "drips", "hangs-after-a-turn", "down-for-a-while", "slow", *ERRORS, *INVALID_REPLIES)
MUTATION, MUTATED_TURNS = "mutation-", 3
"""`mutation-7` damages one answer: see `reply_mutations`."""

_DRIPS = 600


@dataclass
class FaultyEngine(ScriptedEngine):
    """Engine with faults: `slow` takes `slow_s` s an answer, `down-for-a-while` recovers after `down_s` s."""

    slow_s: float = 1.0
    down_s: float = 4.0
    asked: dict[str, int] = field(default_factory=dict)
    """Number of calls by fault."""
    first: dict[str, float] = field(default_factory=dict)
    """Monotonic time of the first call on each fault's path."""
    sent: dict[str, list[bytes]] = field(default_factory=dict)
    """Answers sent on the path of each mutation."""

    def llm_client(self, fault: str) -> TrainClientConfig:
        """Return the client config that a trainer sends, for the faulty path."""
        from plugin_runs import client

        return client(self).model_copy(update={"base_url": f"{self.url}/{fault}/v1"})

    def routes(self) -> list[web.RouteDef]:
        return [
            *super().routes(),
            web.get("/{fault}/v1/models", self._models),
            web.post("/{fault}/inference/v1/generate", self._faulty),
            web.post("/{fault}/v1/chat/completions", self._faulty),
        ]

    async def _faulty(self, request: web.Request) -> web.StreamResponse:
        chat = request.path.endswith("completions")
        body = await request.json()
        fault = self._fault_of(request, body)
        self.asked[fault] = self.asked.get(fault, 0) + 1
        self.first.setdefault(fault, time.monotonic())
        turn = sum(message["role"] == "assistant" for message in body["messages"]) if chat else self._turn(body)
        if fault == "silent" or (fault == "hangs-after-a-turn" and turn > 0):
            await asyncio.sleep(600)
        if fault == "drips":
            return await _drip(request)
        if fault == "down-for-a-while" and time.monotonic() - self.first[fault] < self.down_s:
            assert request.transport is not None
            request.transport.abort()
        if fault == "slow":
            await asyncio.sleep(self.slow_s)
        if fault in ERRORS:
            return web.json_response({"error": {"message": "no"}}, status=ERRORS[fault])
        if fault == "no-json":
            return web.Response(text="<html>a proxy's page</html>")
        good = await (self._chat(request) if chat else self._generate(request))
        assert isinstance(good.body, bytes)
        if fault.startswith(MUTATION):
            return self._mutated(fault, turn, good.body)
        return good if fault not in INVALID_REPLIES else web.json_response(_invalid_reply(json.loads(good.body), fault))

    def _mutated(self, fault: str, turn: int, good: bytes) -> web.Response:
        """Mutate one of the first answers, chosen by the seed."""
        seed = int(fault.removeprefix(MUTATION))
        body = mutated(json.loads(good), seed) if turn == seed % MUTATED_TURNS else good
        self.sent.setdefault(fault, []).append(body)
        return web.Response(body=body, content_type="application/json")

    def _fault_of(self, request: web.Request, body: dict) -> str:
        return request.match_info["fault"]

    def _turn(self, body: dict) -> int:
        return self.tokenizer.decode(body["token_ids"]).count("<|im_start|>assistant") - 1


async def _drip(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "application/json"})
    await response.prepare(request)
    with contextlib.suppress(ConnectionResetError):
        for _ in range(_DRIPS):
            await response.write(b" ")
            await asyncio.sleep(1)
    return response


def _invalid_reply(reply: dict, fault: str) -> dict:
    if fault == "no-choices":
        return {"id": "x"}
    choice = reply["choices"][0]
    content = choice["logprobs"]["content"]
    if fault == "a-logprob-too-few":
        content.pop()
    elif fault == "logprob-of-5":
        content[0]["logprob"] = 5.0
    else:
        choice["token_ids"][0], content[0]["token"] = -7, "token_id:-7"
    return reply
