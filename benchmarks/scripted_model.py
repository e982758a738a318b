"""A model server in its own process: answers every turn after about 20 ms, the last two with `task_complete`.

Usage: scripted_model.py TURNS SECONDS. Prints its URL, then serves until its standard input closes.
"""

import asyncio
import os
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

_TESTS = Path(__file__).resolve().parents[1] / "tests"
_KEY_WAIT_S = 0.1


@contextmanager
def model_server(turns: int, delay_s: float) -> Generator[tuple[str, int]]:
    """Its URL and its process id, for as long as the block runs."""
    command = [sys.executable, __file__, str(turns), str(delay_s)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        yield process.stdout.readline().strip(), process.pid
    finally:
        process.kill()
        process.wait()


async def _serve(turns: int, delay_s: float) -> None:
    sys.path.insert(0, str(_TESTS))
    from fakes import DONE, ScriptedModel, keys  # ty: ignore[import-not-found] (the tests' own)

    first = keys("echo 42 > /app/answer", duration=_KEY_WAIT_S)
    more = [keys(f"ls -la /app; echo turn {n}", duration=_KEY_WAIT_S) for n in range(turns - 3)]
    model = ScriptedModel([first, *more, DONE, DONE], delay_s=delay_s)
    model.requests = _Nothing()
    model.headers = _Nothing()
    async with model.serve():
        print(model.url, flush=True)
        await asyncio.get_running_loop().run_in_executor(None, os.read, 0, 1)


class _Nothing(list):
    """Keeps no request: a benchmark makes thousands."""

    def append(self, _: object) -> None:
        return


if __name__ == "__main__":
    asyncio.run(_serve(int(sys.argv[1]), float(sys.argv[2])))
