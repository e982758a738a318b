"""A scripted model server in its own process. It ends every trial with two `task_complete` answers.

Usage: scripted_model.py TURNS SECONDS [TOKENIZER RENDERER]. Prints its URL, then serves until its stdin closes. It
answers after SECONDS. With a tokenizer it returns token ids and log-probabilities, as an inference engine does.
"""

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from renderers import RendererConfig

_TESTS = Path(__file__).resolve().parents[1] / "tests"
_KEY_WAIT_S = 0.1
_QWEN_TOKENS = ("think", "tool_call", "tool_response")


@contextmanager
def model_server(turns: int, delay_s: float, *engine: str) -> Generator[tuple[str, int]]:
    """Run the server while the block runs; yield its URL and process id.

    Args:
        turns: Number of answers per trial.
        delay_s: Seconds per answer.
        engine: Folder of a tokenizer, and name of a renderer; empty for a server without tokens.
    """
    command = [sys.executable, __file__, str(turns), str(delay_s), *engine]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        yield process.stdout.readline().strip(), process.pid
    finally:
        process.kill()
        process.wait()


def _answers(turns: int) -> list[str]:
    from fakes import DONE, keys  # ty: ignore[import-not-found] (the tests' own)

    first = keys("echo 42 > /app/answer", duration=_KEY_WAIT_S)
    more = [keys(f"ls -la /app; echo turn {n}", duration=_KEY_WAIT_S) for n in range(turns - 3)]
    return [first, *more, DONE, DONE]


def _calls(turns: int) -> list[str]:
    """Return the answers for an agent with a tool named bash; the last one has no tool call."""

    def call(command: str) -> str:
        said = json.dumps({"name": "bash", "arguments": {"command": command}})
        return f"<tool_call>\n{said}\n</tool_call>"

    more = [call(f"ls -la /app; echo turn {n}") for n in range(turns - 2)]
    return [call("echo 42 > /app/answer"), *more, "The answer is there."]


def _serve_engine(turns: int, delay_s: float, tokenizer: str, renderer: str) -> None:
    from scripted_engine import Answer, ScriptedEngine, by_turn  # ty: ignore[import-not-found] (the tests' own)

    typed, called = (
        by_turn([Answer(text, delay_s=delay_s) for text in answers]) for answers in (_answers(turns), _calls(turns))
    )
    script = lambda prompt: (called if "<tools>" in prompt else typed)(prompt)  # noqa: E731
    engine = ScriptedEngine(Path(tokenizer), script, format=renderer_config(renderer))
    engine.samples = engine.requests = _Nothing()
    with engine:
        print(f"{engine.url}/v1", flush=True)
        os.read(0, 1)


def save_tokenizer(folder: Path) -> None:
    """Save the tests' small tokenizer, with the special tokens of Qwen3's chat format."""
    sys.path.insert(0, str(_TESTS))
    from tiny_model import build_tiny_tokenizer  # ty: ignore[import-not-found] (the tests' own)

    tokenizer = build_tiny_tokenizer()
    tokenizer.add_tokens([f"<{end}{name}>" for name in _QWEN_TOKENS for end in ("", "/")], special_tokens=True)
    tokenizer.save_pretrained(folder)


def renderer_config(name: str) -> "RendererConfig":
    """Return a renderer by name. `default` renders the whole history each turn; the others render new messages only."""
    from renderers import CustomRendererConfig, DefaultRendererConfig, Qwen3RendererConfig

    if name == "appending":
        return CustomRendererConfig(import_path="harbortrainer.environment.appending_template.AppendingTemplate")
    return Qwen3RendererConfig(thinking_retention="all") if name == "qwen3" else DefaultRendererConfig()


async def _serve(turns: int, delay_s: float) -> None:
    from fakes import ScriptedModel  # ty: ignore[import-not-found] (the tests' own)

    model = ScriptedModel(_answers(turns), delay_s=delay_s)
    model.requests = _Nothing()
    model.headers = _Nothing()
    async with model.serve():
        print(model.url, flush=True)
        await asyncio.get_running_loop().run_in_executor(None, os.read, 0, 1)


class _Nothing(list):
    """A list that stays empty; a benchmark makes thousands of requests."""

    def append(self, _: object) -> None:
        return


if __name__ == "__main__":
    sys.path.insert(0, str(_TESTS))
    if sys.argv[3:]:
        _serve_engine(int(sys.argv[1]), float(sys.argv[2]), *sys.argv[3:])
    else:
        asyncio.run(_serve(int(sys.argv[1]), float(sys.argv[2])))
