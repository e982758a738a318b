"""Kill runs with SIGKILL at random moments, resume them, and check for leftovers and lost steps.

    python benchmarks/kills.py --config configs/quickstart.toml --kills 20

Checks after each kill:

- No process of the run is left, including its sandboxes and their tmux.
- No mount and no new folder under the temporary folder is left.
- Every finished step is still finished.

A run that reaches its end must be complete; then a new run starts. The last run is resumed once more and must finish.

As root, the runs have their own mount namespace and temporary folder. Otherwise mounts and folders of other programs
count as leftovers.
"""

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import psutil
from leftovers import orphans, remaining_processes

CLEANUP_TIMEOUT_S = 20.0
NAME = "kills"


@dataclass(frozen=True, slots=True)
class Traces:
    """Mounts and temporary folders of the machine."""

    mounts: frozenset[str]
    folders: frozenset[str]

    @staticmethod
    def now() -> "Traces":
        """Return the current mounts and folders."""
        mounts = {line.split()[1] for line in Path("/proc/self/mounts").read_text().splitlines()}
        folders = {path.name for path in Path(tempfile.gettempdir()).iterdir()}
        return Traces(frozenset(mounts), frozenset(folders))

    def left(self, before: "Traces") -> list[str]:
        """Describe what is new since `before`, and orphaned sandboxes."""
        return [
            *(f"mount {item}" for item in sorted(self.mounts - before.mounts)),
            *(f"folder {item}" for item in sorted(self.folders - before.folders)),
            *orphans(),
        ]


def run_isolated() -> None:
    """Restart this program in its own mount namespace and temporary folder; needs root."""
    with tempfile.TemporaryDirectory(prefix="kills-of-") as folder, tempfile.TemporaryDirectory() as caches:
        again = ["unshare", "--mount", "--kill-child", "--fork", sys.executable, *sys.argv, "--apart"]
        own = {"TMPDIR": folder, "TORCHINDUCTOR_CACHE_DIR": caches}
        raise SystemExit(subprocess.run(again, env=os.environ | own, check=False).returncode)


def command(config: str, root: Path, extra: list[str], *, resume: bool) -> list[str]:
    """Return the command line of one start."""
    start = [sys.executable, "-m", "src.train", "--config", config, "--engine", "local"]
    return [*start, "--output-dir", str(root), "--run.name", NAME, *extra, *(["--resume"] if resume else [])]


def last_step(run: Path) -> int:
    """Return the last finished step."""
    steps = [int(path.parent.name.removeprefix("step_")) for path in run.glob("checkpoints/step_*/progress.json")]
    return max(steps, default=0)


def kill_once(start: list[str], run: Path, delay: float) -> dict[str, object]:
    """Start a run, kill it after `delay` seconds, and return what was found."""
    before, finished = Traces.now(), last_step(run)
    with (run.parent / "kills.log").open("a") as log:
        process = subprocess.Popen(start, stdout=log, stderr=log)
    try:
        process.wait(delay)
    except subprocess.TimeoutExpired:
        family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
        process.kill()
        process.wait()
        left = remaining_processes(family, within=CLEANUP_TIMEOUT_S) + Traces.now().left(before)
        return {"delay": round(delay, 1), "step": [finished, last_step(run)], "family": len(family), "left": left}
    return {"delay": round(delay, 1), "ended": process.returncode, "step": [finished, last_step(run)], "left": []}


def steps_written(run: Path) -> list[int]:
    """Return the steps in `metrics.jsonl`, in order."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [row["step"] for row in rows if "loss" in row]


def is_whole(run: Path, code: object) -> bool:
    """Whether a run that ended by itself succeeded, with every step once."""
    steps = steps_written(run)
    return code == 0 and steps == list(range(1, len(steps) + 1))


def main() -> int:
    """Kill, resume and report. The exit code is 1 if anything was left behind or lost."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="configs/quickstart.toml")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--longest", type=float, default=90.0, help="maximum seconds before a kill")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--apart", action="store_true", help=argparse.SUPPRESS)
    options, extra = parser.parse_known_args()
    if os.geteuid() == 0 and not options.apart:
        run_isolated()
    rng, bad, kills, lives = random.Random(options.seed), 0, 0, 1
    with tempfile.TemporaryDirectory(prefix="kills-") as folder:
        # A copy, since the file may be edited during the benchmark.
        options.config = shutil.copy(options.config, Path(folder, "run.toml"))
        while kills < options.kills:
            run = Path(folder, f"life{lives}", NAME)
            run.parent.mkdir(exist_ok=True)
            start = command(options.config, run.parent, extra, resume=(run / "config.toml").exists())
            result = kill_once(start, run, rng.uniform(1.0, options.longest))
            before, after = result["step"]  # ty: ignore[not-iterable]
            ended = result.get("ended")
            bad += bool(result["left"]) or after < before or (ended is not None and not is_whole(run, ended))
            kills, lives = kills + (ended is None), lives + (ended is not None)
            print(json.dumps({"kill": kills, **result}), flush=True)
            if ended:
                break  # the error is permanent
        started = time.monotonic()
        code = subprocess.run(command(options.config, run.parent, extra, resume=True), check=False).returncode
        whole, seconds = is_whole(run, code), round(time.monotonic() - started)
        print(json.dumps({"kills": kills, "runs": lives, "bad": bad, "finished": whole, "s": seconds}))
        if not whole:
            print((run.parent / "kills.log").read_text()[-3000:])
    return int(bool(bad) or not whole)


if __name__ == "__main__":
    sys.exit(main())
