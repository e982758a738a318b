"""Inject one fault per run, and report the step at which a check stops it; runs without a fault must not be stopped.

    python benchmarks/sabotage.py --config configs/quickstart.toml --clean 10

Creates the run file's policy once. For every dtype it then starts one run per fault of `sabotages.py`, and `--clean`
runs without a fault, each with its own seed. Trials, sampler and learner are real; each run has its own process.
Evaluations are left out.

`--rig N` adds N runs of `logprob_check_rig.py`, which are faster: a few steps without a fault and without trials.
`--rig-faults` adds such a run for each fault of the sampler. The prompts are the instructions of the run file's
tasks. For the model of `make demo`, after its warm-up:

    python benchmarks/sabotage.py --config configs/laptop.toml --model outputs/laptop/model --faults --clean 0 \
        --rig 10 --rig-faults --rig-steps 4

On a GPU pass `--dtypes bfloat16`; torch chooses the device.
"""

import argparse
import json
import random
import shutil
import subprocess
import sys
import tempfile
import tomllib
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from functools import partial, partialmethod
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import tomlkit
from logprob_check_rig import LogprobCheckRig
from sabotages import REWARDS, SABOTAGES, SAMPLES_OF_TRIALS, TURNS, sabotaged

DTYPES = ("float32", "bfloat16")
WITHIN = 3
"""Number of steps within which a fault must be found."""
LIMIT_S = 1800


@dataclass(frozen=True, slots=True)
class RunResult:
    """Result of one run."""

    fault: str
    dtype: str
    seed: int
    steps: int
    stopped_at: int | None
    said: str
    reached: dict[str, float]
    """Maximum of each of the check's metrics in the run."""
    cost: float | None
    """Share of the steps' time that rescoring and the alternative versions took."""


def write_run(config: Path, model: Path, folder: Path, *, seed: int) -> Path:
    """Write the run file with an existing policy and without evaluations; return its path."""
    run = tomllib.loads(config.read_text())
    run.pop("warmup", None)
    run["orchestrator"].pop("eval", None)
    run |= {"model": {"name": str(model)}, "seed": seed, "output_dir": str(folder), "run": {"name": "run"}}
    path = folder / "run.toml"
    path.write_text(tomlkit.dumps(run))
    return path


def play(name: str, dtype: str, config: Path) -> int:
    """Run in this process with one fault; return the exit code."""
    from harbortrainer.cli import main
    from harbortrainer.engines.local.learner.learner import Learner
    from harbortrainer.engines.local.sampler import Sampler

    for part in (Learner, Sampler):
        setattr(part, "__init__", partialmethod(part.__init__, dtype=dtype))  # noqa: B010 (ty knows no other way)
    with sabotaged(name):
        return main(["train", "--engine", "local", "--config", str(config)])


def run_once(name: str, dtype: str, config: Path, model: Path, *, seed: int = 0) -> RunResult:
    """Run in a new process, and return the result."""
    folder = Path(tempfile.mkdtemp(prefix="sabotage-"))
    file = write_run(config, model, folder, seed=seed)
    command = [sys.executable, __file__, "--play", name, "--dtypes", dtype, "--config", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    if done.returncode not in (0, 1):
        raise SystemExit(f"{name}, {dtype}: exit code {done.returncode}: {done.stderr[-2000:]}")
    written = folder / "run" / "metrics.jsonl"
    rows = [json.loads(line) for line in written.read_text().splitlines()] if written.exists() else []
    shutil.rmtree(folder, ignore_errors=True)
    names = sorted({key for row in rows for key in row if key.startswith("proof/")})
    reached = {key: max(abs(row[key]) for row in rows if key in row) for key in names}
    cost = sum(row["time/score_again"] + row["time/other_versions"] for row in rows)
    said = [line for line in done.stderr.splitlines() if line.startswith("stopped: ")]
    if done.returncode and not said:  # another error, which must not count as a found fault
        raise SystemExit(f"{name}, {dtype}: not stopped by a check: {done.stderr[-2000:]}")
    return RunResult(
        name, dtype, seed, len(rows), len(rows) + 1 if done.returncode else None, said[-1] if said else "",
        reached, cost / sum(row["time/step"] for row in rows) if rows else None,
    )  # fmt: skip


def make_policy(config: Path, folder: Path) -> Path:
    """Create the run file's policy by its warm-up; return the folder."""
    from harbortrainer.config.reader import load
    from harbortrainer.runs.display import Display
    from harbortrainer.warmup.warmup import warm_up

    run = load(config)
    if run.warmup is None:
        raise SystemExit("this run file has no [warmup]; pass the folder of a policy with --model")
    warm_up(run.warmup, folder / "policy", seed=run.seed, display=Display())
    return folder / "policy"


def run_rig(name: str, dtype: str, *, config: Path, model: Path, steps: int, seed: int) -> RunResult:
    """Run without trials, in a new process."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(play_rig, name, dtype, config, model, steps, seed).result()


def play_rig(name: str, dtype: str, config: Path, model: Path, steps: int, seed: int) -> RunResult:
    """Run without trials. The prompts are the instructions of eight tasks of the run file."""
    from transformers import AutoTokenizer

    from harbortrainer.config.reader import load

    run = load(config)
    tokenizer: Any = AutoTokenizer.from_pretrained(model)
    tasks = Path(run.orchestrator.train.source[0].env["taskset"]["tasks_dir"])
    texts = [file.read_text() for file in sorted(tasks.glob("*/instruction.md"))]
    chosen = random.Random(seed).sample(texts, min(8, len(texts)))
    asked = [[{"role": "user", "content": text}] for text in chosen]
    written = [str(tokenizer.apply_chat_template(m, add_generation_prompt=True, tokenize=False)) for m in asked]
    prompts = [tokenizer.encode(text, add_special_tokens=False) for text in written]
    rig = LogprobCheckRig(model, dtype, prompts, lr=run.trainer.optim.lr, seed=seed, lora=run.trainer.model.lora)
    with nullcontext() if name == "none" else sabotaged(name):
        stopped = rig.stopped_at(steps)
    return RunResult(f"{name}, on the rig", dtype, seed, stopped or steps, stopped, rig.message, rig.max_metrics, None)


def run_all(asked: argparse.Namespace) -> int:
    """Run everything, print a line per run, then the maxima of the faultless runs; return the exit code."""
    folder = Path(tempfile.mkdtemp(prefix="sabotage-policy-"))
    model = asked.model.resolve() if asked.model else make_policy(asked.config, folder)
    wrong = 0
    rig = partial(run_rig, config=asked.config, model=model, steps=asked.rig_steps)
    for dtype in asked.dtypes:
        for name in asked.faults:
            played = report(run_once(name, dtype, asked.config, model), asked.json)
            wrong += played.stopped_at is None or played.stopped_at > WITHIN
        for name in SABOTAGES if asked.rig_faults else ():
            played = report(rig(name, dtype, seed=0), asked.json)
            wrong += played.stopped_at is None or played.stopped_at > WITHIN
        clean = [
            *(
                report(run_once("none", dtype, asked.config, model, seed=seed), asked.json)
                for seed in range(asked.clean)
            ),
            *(report(rig("none", dtype, seed=seed), asked.json) for seed in range(asked.rig)),
        ]
        wrong += sum(played.stopped_at is not None for played in clean)
        names = sorted({name for played in clean for name in played.reached})
        most = {name: max(played.reached.get(name, 0.0) for played in clean) for name in names}
        print(f"{dtype}: {len(clean)} clean runs, at most", {name: float(f"{f:.3g}") for name, f in most.items()})
    shutil.rmtree(folder, ignore_errors=True)
    return min(wrong, 1)


def report(played: RunResult, file: Path | None) -> RunResult:
    """Print one result, and append it to the file."""
    how = f"stopped at step {played.stopped_at}" if played.stopped_at else "not stopped"
    cost = f", proof {played.cost:.1%} of a step" if played.cost is not None else ""
    print(f"{played.dtype:9} {played.fault:20} seed {played.seed}: {how}{cost}  {played.said}", flush=True)
    if file:
        with file.open("a") as lines:
            lines.write(json.dumps(asdict(played)) + "\n")
    return played


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--config", type=Path, default=Path("configs/quickstart.toml"))
    parser.add_argument("--model", type=Path, help="folder of a policy (default: created by the run file's warm-up)")
    parser.add_argument("--dtypes", nargs="+", default=DTYPES, choices=DTYPES)
    parser.add_argument("--faults", nargs="*", default=[*SABOTAGES, *TURNS, *REWARDS, *SAMPLES_OF_TRIALS])
    parser.add_argument("--clean", type=int, default=10, help="whole runs without a fault, per dtype")
    parser.add_argument("--rig", type=int, default=0, help="runs without a fault and without trials, per dtype")
    parser.add_argument("--rig-steps", type=int, default=10, help="steps of a run without trials")
    parser.add_argument("--rig-faults", action="store_true", help="play the sampler's faults without trials, too")
    parser.add_argument("--json", type=Path, help="file for one JSON line per run")
    parser.add_argument("--play", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.play:
        return play(asked.play, asked.dtypes[0], asked.config)
    return run_all(asked)


if __name__ == "__main__":
    sys.exit(main())
