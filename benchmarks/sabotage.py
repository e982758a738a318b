"""Whole runs with one fault in each: the step at which the proof stops them, and that clean ones are not stopped.

    python benchmarks/sabotage.py --config configs/quickstart.toml --clean 10

Makes the run file's policy once, then plays, for every dtype and every fault of `sabotages.py`, a run from it until the
proof stops it, and `--clean` whole runs without a fault, each with a seed of its own. Real trials, the real sampler and
the real learner, a process a run; no evaluations, which train nothing. `--rig N` adds N clean runs of ten steps without
trials (`proof_rig.py`), for more of them in the same time.

On a GPU: `--dtypes bfloat16`, since the run file's device is whatever torch finds.
"""

import argparse
import json
import random
import shutil
import subprocess
import sys
import tempfile
import tomllib
from dataclasses import asdict, dataclass
from functools import partialmethod
from pathlib import Path

import tomlkit
from proof_rig import ProofRig
from sabotages import REWARDS, SABOTAGES, TURNS, sabotaged

DTYPES = ("float32", "bfloat16")
WITHIN = 3
"""Steps in which a fault is to be found."""
LIMIT_S = 1800


@dataclass(frozen=True, slots=True)
class Played:
    """How one run went."""

    fault: str
    dtype: str
    seed: int
    steps: int
    stopped_at: int | None
    said: str
    reached: dict[str, float]
    """Each figure of the proof, the largest of the run."""
    cost: float | None
    """Share of the steps' time that the second scoring and the other versions took."""


def write_run(config: Path, model: Path, folder: Path, *, seed: int) -> Path:
    """The run file with a policy that is there, without evaluations."""
    run = tomllib.loads(config.read_text())
    run.pop("warmup", None)
    run["orchestrator"].pop("eval", None)
    run |= {"model": {"name": str(model)}, "seed": seed, "output_dir": str(folder), "run": {"name": "run"}}
    path = folder / "run.toml"
    path.write_text(tomlkit.dumps(run))
    return path


def play(name: str, dtype: str, config: Path) -> int:
    """One run in this process, with a fault in it."""
    from harbortrainer.cli import main
    from harbortrainer.engines.local.learner.learner import Learner
    from harbortrainer.engines.local.sampler import Sampler

    for part in (Learner, Sampler):
        setattr(part, "__init__", partialmethod(part.__init__, dtype=dtype))  # noqa: B010 (ty knows no other way)
    with sabotaged(name):
        return main(["train", "--engine", "local", "--config", str(config)])


def outcome(name: str, dtype: str, config: Path, model: Path, *, seed: int = 0) -> Played:
    """One run in a process of its own."""
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
    if done.returncode and not said:  # something else ended it, which would be counted as a find
        raise SystemExit(f"{name}, {dtype}: ended by no proof: {done.stderr[-2000:]}")
    return Played(
        name, dtype, seed, len(rows), len(rows) + 1 if done.returncode else None, said[-1] if said else "",
        reached, cost / sum(row["time/step"] for row in rows) if rows else None,
    )  # fmt: skip


def make_policy(config: Path, folder: Path) -> Path:
    """The run file's own policy."""
    from harbortrainer.config.reader import load
    from harbortrainer.runs.display import Display
    from harbortrainer.warmup.warmup import warm_up

    run = load(config)
    if run.warmup is None:
        raise SystemExit("--model: this run file has no [warmup] that makes a policy")
    warm_up(run.warmup, folder / "policy", seed=run.seed, display=Display())
    return folder / "policy"


def on_rig(dtype: str, model: Path, seed: int) -> Played:
    """A clean run of ten steps without trials: the policy goes on from random tokens."""
    chance = random.Random(seed)
    vocabulary = json.loads((model / "config.json").read_text())["vocab_size"]
    prompts = [[chance.randrange(10, vocabulary) for _ in range(8 + i)] for i in range(12)]
    rig = ProofRig(model, dtype, prompts, group=6, max_tokens=32, seed=seed)
    stopped = rig.stopped_at(10)
    return Played("none, on the rig", dtype, seed, 10, stopped, rig.message, rig.reached, None)


def table(asked: argparse.Namespace) -> int:
    """Every run asked for, a line each as it ends; then what the clean ones reached at most."""
    folder = Path(tempfile.mkdtemp(prefix="sabotage-policy-"))
    model = asked.model.resolve() if asked.model else make_policy(asked.config, folder)
    wrong = 0
    for dtype in asked.dtypes:
        for name in asked.faults:
            played = tell(outcome(name, dtype, asked.config, model), asked.json)
            wrong += played.stopped_at is None or played.stopped_at > WITHIN
        clean = [
            *(tell(outcome("none", dtype, asked.config, model, seed=seed), asked.json) for seed in range(asked.clean)),
            *(tell(on_rig(dtype, model, seed), asked.json) for seed in range(asked.rig)),
        ]
        wrong += sum(played.stopped_at is not None for played in clean)
        names = sorted({name for played in clean for name in played.reached})
        most = {name: max(played.reached.get(name, 0.0) for played in clean) for name in names}
        print(f"{dtype}: {len(clean)} clean runs, at most", {name: float(f"{f:.3g}") for name, f in most.items()})
    shutil.rmtree(folder, ignore_errors=True)
    return min(wrong, 1)


def tell(played: Played, file: Path | None) -> Played:
    """Print one run, and keep it."""
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
    parser.add_argument("--model", type=Path, help="a policy's folder; none: the run file's warm-up makes it")
    parser.add_argument("--dtypes", nargs="+", default=DTYPES, choices=DTYPES)
    parser.add_argument("--faults", nargs="*", default=[*SABOTAGES, *TURNS, *REWARDS])
    parser.add_argument("--clean", type=int, default=10, help="whole runs without a fault, of each dtype")
    parser.add_argument("--rig", type=int, default=0, help="clean runs without trials, of each dtype")
    parser.add_argument("--json", type=Path, help="where each run's line goes")
    parser.add_argument("--play", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.play:
        return play(asked.play, asked.dtypes[0], asked.config)
    return table(asked)


if __name__ == "__main__":
    sys.exit(main())
