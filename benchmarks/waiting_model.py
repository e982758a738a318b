"""A model server in its own process that waits and then answers, for thousands of concurrent trials.

Usage: waiting_model.py TURNS LOW HIGH TOKENIZER HOST. Prints its URL, then serves until its stdin closes. It has the
endpoint of a train client (`/inference/v1/generate`). The trial's id and the turn determine the answer and its seconds,
so `benchmarks/scale.py` knows the reward and the waits of each trial.
"""

import asyncio
import hashlib
import json
import os
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Generator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

from aiohttp import web

_TESTS = Path(__file__).resolve().parents[1] / "tests"
_KEY_WAIT_S = 0.1
SEED_CHARS = 12
"""Characters of a trace's id in the name of its trial; they are the trial's seed."""


def answer_of(seed: str) -> int:
    """Return the number that the model writes in a trial, below 1000."""
    return int.from_bytes(hashlib.sha256(seed.encode()).digest()[:4]) % 1000


def seconds_of(seed: str, turn: int, low: float, high: float) -> float:
    """Return the seconds that an answer takes."""
    return random.Random(f"{seed} {turn}").uniform(low, high)


@contextmanager
def waiting_model(turns: int, low: float, high: float, tokenizer: Path, host: str = "127.0.0.1") -> Generator[str]:
    """Run the server while the block runs; yield its URL, which ends in /v1."""
    command = [sys.executable, __file__, str(turns), str(low), str(high), str(tokenizer), host]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        yield process.stdout.readline().strip()
    finally:
        process.kill()
        process.wait()


class WaitingModel:
    """The server's endpoints.

    Args:
        turns: Answers of a trial.
        low: Seconds of the fastest answer.
        high: Seconds of the slowest answer.
        tokenizer: Folder of the tokenizer.
    """

    def __init__(self, turns: int, low: float, high: float, tokenizer: Path) -> None:
        from renderers.base import load_tokenizer

        self.turns, self.low, self.high = turns, low, high
        self.tokenizer = load_tokenizer(str(tokenizer))
        self.answered: Counter[str] = Counter()
        self.answer = cache(self._encoded)  # the trials share these cores

    async def generate(self, request: web.Request) -> web.Response:
        """Answer one turn of one trial."""
        await request.read()
        seed = request.headers["X-Session-ID"][:SEED_CHARS]
        turn = self.answered[seed]
        self.answered[seed] += 1
        await asyncio.sleep(seconds_of(seed, turn, self.low, self.high))
        return web.Response(body=self.answer(self._text(seed, turn)), content_type="application/json")

    def _encoded(self, text: str) -> bytes:
        tokens = [*self.tokenizer.encode(text, add_special_tokens=False), self.tokenizer.eos_token_id]
        content = [{"token": f"token_id:{token}", "logprob": -0.5, "top_logprobs": []} for token in tokens]
        choice = {"index": 0, "finish_reason": "stop", "logprobs": {"content": content}, "token_ids": tokens}
        return json.dumps({"request_id": "waiting", "choices": [choice]}).encode()

    async def models(self, request: web.Request) -> web.Response:
        """Report the context length."""
        del request
        return web.json_response({"data": [{"id": "waiting", "max_model_len": 100_000}]})

    def _text(self, seed: str, turn: int) -> str:
        from fakes import DONE, keys  # ty: ignore[import-not-found] (the tests' own)

        if turn == 0:
            return keys(f"echo {answer_of(seed)} > /app/answer", duration=_KEY_WAIT_S)
        return keys(f"ls -la /app; echo turn {turn}", duration=_KEY_WAIT_S) if turn < self.turns - 2 else DONE


async def _serve(model: WaitingModel, host: str) -> None:
    app = web.Application(client_max_size=1 << 26)
    app.router.add_post("/inference/v1/generate", model.generate)
    app.router.add_get("/v1/models", model.models)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, host, 0, backlog=4096).start()
    print(f"http://{host}:{runner.addresses[0][1]}/v1", flush=True)
    await asyncio.get_running_loop().run_in_executor(None, os.read, 0, 1)


if __name__ == "__main__":
    sys.path.insert(0, str(_TESTS))
    model = WaitingModel(int(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3]), Path(sys.argv[4]))
    asyncio.run(_serve(model, sys.argv[5]))
