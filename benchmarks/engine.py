"""Compare the embedded engine with transformers' `generate` and TRL's GRPOTrainer, on one model and batch.

Contract:

- Both sides get the same random model, LoRA, prompts, number of tokens and number of threads.
- No repeat reuses what an earlier one computed, except in the row with known prompts.
- Every figure is the median of `--repeats` runs after a warm-up run.
- Our engine is measured as a run uses it: over HTTP, from another process.

Needs `uv run --extra local --group bench benchmarks/engine.py`.

    benchmarks/engine.py                                            the quickstart's model on one CPU thread
    benchmarks/engine.py --device cuda --model-shape qwen3-0.6b     the measurement for docs/gpu.md
    benchmarks/engine.py --model-shape qwen3-8b --layers 2 --only lengths    two layers of a shape, fewer rows
    benchmarks/engine.py --only memory                              peak memory of our engine
"""

import argparse
import json
import os
import signal
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.engine_memory import peaks
from benchmarks.engine_ours import Ours
from benchmarks.engine_setting import (
    SHAPES,
    SHARED,
    TURNS,
    Setting,
    build_model,
    make_setting,
    next_turn,
    ragged,
    shared_prompt,
)
from benchmarks.engine_theirs import Generate, trl_steps

SAMPLING = None, "sampling", "lengths", "shared"
"""Values of `--only` that measure sampling."""


@dataclass(frozen=True)
class Row:
    """Tokens per second of both sides, one figure per repeat."""

    what: str
    ours: list[float]
    against: str
    theirs: list[float]

    @property
    def ratio(self) -> float:
        return statistics.median(self.ours) / statistics.median(self.theirs)


def interleave(times: int, *runs: Callable[[], float]) -> list[list[float]]:
    """Return each run's results without the first. The runs alternate, so that machine load affects all of them."""
    results = [[run() for run in runs] for _ in range(times + 1)]
    return [list(column) for column in zip(*results[1:], strict=True)]


def compare_sampling(case: Setting, ours: Ours, asked: str | None) -> Iterator[Row]:
    """Yield the sampled tokens per second of each case.

    - equal lengths: the best case of a static batch
    - ragged lengths
    - ragged lengths with cached prompts; `generate` keeps no cache between calls
    - a long shared prompt
    - several turns
    """
    generate, equal, mixed = Generate(case, ours.plain), [case.new] * len(case.prompts), ragged(case)
    cases = {
        "equal lengths": (ours.sample_afresh, case.prompt_ids, equal),
        "ragged lengths": (ours.sample_afresh, *mixed),
        "ragged, prompts known": (ours.sample, *mixed),
        f"shared prompt of {SHARED}": (ours.sample_afresh, shared_prompt(case), equal),
    }
    wanted = {"lengths": ("equal", "ragged"), "shared": ("shared",)}.get(asked or "", ("",))
    for name, (sample, prompts, lengths) in cases.items():
        if not name.startswith(wanted):
            continue
        tokens = sum(lengths)
        mine, theirs = interleave(
            case.repeats,
            lambda s=sample, p=prompts, n=lengths: s(p, n)[0],
            lambda p=prompts, n=lengths: generate.sample(p, n),
        )
        yield Row(f"sampled, {name}", [tokens / s for s in mine], "generate", [tokens / s for s in theirs])
    if wanted == ("",):
        yield compare_turns(case, ours, generate)


def compare_turns(case: Setting, ours: Ours, generate: Generate) -> Row:
    """Compare several turns of one trial per prompt; each turn's prompt is the whole conversation so far."""
    new, tokens = [case.new] * len(case.prompts), TURNS * case.sampled

    def play(seconds_and_answers: Callable[[list[list[int]]], tuple[float, list[list[int]]]]) -> float:
        ours.update_weights()
        prompts, seconds = case.prompt_ids, 0.0
        for _ in range(TURNS):
            took, answers = seconds_and_answers(prompts)
            seconds += took
            prompts = next_turn(case, prompts, answers)
        return seconds

    def answered(prompts: list[list[int]]) -> tuple[float, list[list[int]]]:
        seconds, choices = ours.sample(prompts, new)
        return seconds, [choice["token_ids"] for choice in choices]

    mine, theirs = interleave(
        case.repeats,
        lambda: play(answered),
        # The other side's answers are random tokens of the same length.
        lambda: play(lambda prompts: (generate.sample(prompts, new), [p[: case.new] for p in case.prompt_ids])),
    )
    return Row(f"sampled, {TURNS} turns", [tokens / s for s in mine], "generate", [tokens / s for s in theirs])


def compare_steps(case: Setting, ours: Ours) -> Iterator[Row]:
    """Yield the trained tokens per second: training alone, and a whole step with sampling and weight update."""
    _, choices = ours.sample(case.prompt_ids, [case.new] * len(case.prompts))
    rollouts = {
        "prompt_ids": case.prompt_ids,
        "completion_ids": [c["token_ids"] for c in choices],
        "logprobs": [[e["logprob"] for e in c["logprobs"]["content"]] for c in choices],
    }
    for name, part, given in (("trained", 1, rollouts), ("sampled and trained", 0, None)):
        steps: list[tuple[float, float]] = []
        theirs = trl_steps(case, given, between=lambda into=steps: into.append(ours.step()))
        mine = [step[part] for step in steps[1:]]
        yield Row(name, [case.sampled / s for s in mine], "TRL", [case.sampled / s for s in theirs])


def print_rows(rows: Iterable[Row]) -> Iterator[Row]:
    """Print each row as soon as it is measured, since a large shape takes minutes per row; yield the rows."""
    print(f"{'tokens a second (median)':32}{'ours':>10}{'theirs':>10}{'ratio':>8}  against", flush=True)
    for row in rows:
        mine, theirs = statistics.median(row.ours), statistics.median(row.theirs)
        print(f"{row.what:32}{mine:10.0f}{theirs:10.0f}{row.ratio:8.2f}  {row.against}", flush=True)
        yield row


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Compare the embedded engine with transformers' generate and TRL")
    parser.add_argument("--model-shape", choices=sorted(SHAPES), default="tiny")
    parser.add_argument("--layers", type=int, default=None, help="number of layers (default: all of the shape)")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--dtype", default=None, help="default: float32 on a CPU, bfloat16 on a GPU")
    parser.add_argument("--batch", type=int, default=64, help="completions per step")
    parser.add_argument("--group", type=int, default=8, help="completions per prompt")
    parser.add_argument("--prompt", type=int, default=200, help="tokens per prompt")
    parser.add_argument("--new", type=int, default=40, help="tokens per completion")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1, help="torch threads, on a CPU")
    parser.add_argument("--only", choices=["sampling", "lengths", "shared", "steps", "memory"], default=None)
    parser.add_argument(
        "--before", type=Path, default=None, help="with --only memory: another checkout to compare with"
    )
    parser.add_argument("--json", type=Path, default=None, help="also write the figures to this file")
    return parser.parse_args()


def main() -> int:
    arguments = parse()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # removes the model's folder
    os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
    os.environ["OMP_NUM_THREADS"] = str(arguments.threads)
    import torch
    from transformers.utils import logging

    torch.set_num_threads(arguments.threads)
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    with tempfile.TemporaryDirectory() as folder:
        build_model(Path(folder), arguments)
        case = make_setting(Path(folder), arguments)
        if arguments.only == "memory":
            return report([], peaks(case, arguments.before), arguments)
        ours = Ours(case)
        try:
            asked = [compare_sampling(case, ours, arguments.only)] if arguments.only in SAMPLING else []
            asked += [compare_steps(case, ours)] if arguments.only in (None, "steps") else []
            rows = list(print_rows(chain(*asked)))
        finally:
            ours.close()
    extra = {"hand-over, ms (median)": 1000 * statistics.median(ours.handovers)}
    if ours.differences:
        extra["largest logprob difference"] = max(ours.differences)
    return report(rows, extra, arguments)


def report(rows: list[Row], extra: dict[str, float], arguments: argparse.Namespace) -> int:
    """Print the figures besides the rows, and write all of them to `--json`."""
    for name, value in extra.items():
        print(f"{name:36}{value:10.3g}")
    if arguments.json:
        figures = {row.what: {"ours": row.ours, row.against: row.theirs, "ratio": row.ratio} for row in rows}
        arguments.json.write_text(
            json.dumps({"arguments": vars(arguments), "rows": figures} | extra, default=str, indent=1)
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
