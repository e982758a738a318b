"""Where a step's time goes, and how fast the sampler was."""

import time
from collections.abc import Generator, Mapping
from contextlib import contextmanager


class Stopwatch:
    """Adds up named parts of a step; `lap` gives them and starts the next."""

    def __init__(self) -> None:
        self.parts: dict[str, float] = {}
        self.numbers: dict[str, float] = {}
        self._step = time.monotonic()
        self._before: dict[str, float] = {}

    @contextmanager
    def timed(self, name: str) -> Generator[None]:
        """Add the block's seconds to the part `name`."""
        start = time.monotonic()
        try:
            yield
        finally:
            self.parts[name] = self.parts.get(name, 0.0) + time.monotonic() - start

    def lap(self) -> dict[str, float]:
        """The parts since the last lap, the whole as `time/step`, and the `numbers` that were put here meanwhile."""
        out = self.numbers | self.parts | {"time/step": time.monotonic() - self._step}
        self.parts, self.numbers = {}, {}
        self.restart()
        return out

    def restart(self) -> None:
        """The step begins now: what came before is not part of it."""
        self._step = time.monotonic()

    def rates(self, counters: Mapping[str, float]) -> dict[str, float]:
        """The sampling since the last call, from running counters `sampled_tokens` and `busy_s`."""
        did = {name: value - self._before.get(name, 0.0) for name, value in counters.items()}
        self._before = dict(counters)
        out = {"time/sample": did["busy_s"], "sampler/tokens": did["sampled_tokens"]}
        if did["busy_s"] > 0:
            out["perf/sampled_tokens_per_s"] = did["sampled_tokens"] / did["busy_s"]
        return out
