"""The quickstart on Prime-RL's real programs: it learns, survives two kills, is viewed and exported.

One run, with two restarts: the trainer is killed, then a worker of the env server.
"""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import psutil
import pytest
import train_on_cpu
from conftest import REPOSITORY, PrimeRL, free_port
from safetensors.torch import load_file
from starlette.testclient import TestClient

from harbortrainer.cli import main
from harbortrainer.engines.prime_rl.resume import Checkpoints
from harbortrainer.runs.episode_limit import EpisodeLimit
from harbortrainer.runs.prime_rl_files import step_files
from harbortrainer.runs.provenance import engine_of, named_model, run_config
from harbortrainer.view.queries import TrialFilter
from harbortrainer.view.run_folders import open_store, prime_rl_names
from harbortrainer.view.server import Site

pytestmark = pytest.mark.prime_rl

STEPS, BATCH = 8, 32
STOP_TIMEOUT_S = 180
"""Time for a failure to be detected, `rl` to end, and leftover processes to be removed."""


class CpuRun:
    """`train_on_cpu.py` as a process."""

    def __init__(self, folder: Path, *words: str) -> None:
        self.folder = folder / "outputs/r"
        command = [sys.executable, train_on_cpu.__file__, "--config", "configs/quickstart.toml", *words]
        place = ["--output-dir", str(folder / "outputs"), "--run.name", "r"]
        ports = ["--orchestrator.env-server-base-port", str(free_port())]
        pipe = subprocess.PIPE
        variables = os.environ | {"PYTHONPATH": str(REPOSITORY / "src")}
        self.process = subprocess.Popen(
            [*command, *place, *ports], stdout=pipe, stderr=subprocess.STDOUT, text=True, env=variables, cwd=REPOSITORY
        )
        self.lines: list[str] = []
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        self.lines.extend(self.process.stdout)

    @property
    def text(self) -> str:
        return "".join(self.lines)

    def wait_until(self, condition: Callable[[], object], timeout_s: float = 900) -> None:
        """Wait until the condition holds; fail if the run ends first."""
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert self.process.poll() is None, self.text[-6000:]
            assert time.monotonic() < deadline, self.text[-6000:]
            time.sleep(0.2)

    def step(self) -> int:
        """Return the last step whose checkpoint trainer and orchestrator have completed."""
        checkpoints = self.folder / "checkpoints"
        return Checkpoints(checkpoints, checkpoints).newest_whole()[0] or 0

    def kill(self, chosen: Callable[[psutil.Process], object]) -> int:
        """Kill the oldest chosen process of the run, as the kernel does without memory; return its process id."""
        found = [p for p in psutil.Process(self.process.pid).children(recursive=True) if _holds(chosen, p)]
        oldest = min(found, key=psutil.Process.create_time)
        os.kill(oldest.pid, signal.SIGKILL)
        return oldest.pid


def _holds(chosen: Callable[[psutil.Process], object], process: psutil.Process) -> bool:
    try:
        return bool(chosen(process))
    except (psutil.Error, OSError):
        return False


def is_trainer(process: psutil.Process) -> bool:
    return "PRIME-RL::Trainer" in " ".join(process.cmdline())


def is_worker(process: psutil.Process) -> bool:
    output = Path(f"/proc/{process.pid}/fd/1").readlink()
    return any("spawn_main" in word for word in process.cmdline()) and output.parent.parts[-2:] == ("envs", "train")


@contextmanager
def started(folder: Path, *words: str) -> Generator[CpuRun]:
    run = CpuRun(folder, *words)
    try:
        yield run
    finally:
        if run.process.poll() is None:
            run.process.send_signal(signal.SIGTERM)
            run.process.wait(90)
        run.reader.join(10)


def mean_reward(folder: Path, steps: str) -> float:
    """Return the mean reward of the trials of these steps' batches, as the dashboard reads them."""
    store, rewards = open_store(folder), []
    wanted = TrialFilter(kind="train", step=steps)
    for page in range(1, store.find(wanted)[1] + 1):
        rows, _ = store.find(replace(wanted, page=page))
        rewards += [row.reward for row in rows if row.reward is not None and row.untrained != "left out by Prime-RL"]
    return fmean(rewards)


def test_run_learns_and_survives_two_kills(prime_rl: PrimeRL, tmp_path: Path) -> None:
    words = ["--max-steps", str(STEPS), "--trainer.scheduler.decay-steps", str(STEPS)]
    words += ["--orchestrator.batch-size", str(BATCH), "--orchestrator.eval", "None"]
    words += ["--orchestrator.train.source.0.serve.pool", '{"type": "elastic"}']
    with started(tmp_path, *words, "--restarts", "2") as run:
        run.wait_until(lambda: run.step() >= 2)
        run.kill(is_trainer)
        run.wait_until(lambda: "restarting (2 of 2 restarts left)" in run.text, STOP_TIMEOUT_S)
        first = run.step()
        run.wait_until(lambda: run.step() > first)
        worker = run.kill(is_worker)
        run.wait_until(lambda: "restarting (1 of 2 restarts left)" in run.text, STOP_TIMEOUT_S)
        second = run.step()
        assert run.process.wait(900) == 0, run.text[-6000:]
    assert "trainer ended with exit code 1" in run.text and "Signal 9 (SIGKILL)" in run.text
    stall = f"the run stalled and was ended: a worker of the train env server quickstart exited (process {worker})"
    assert stall in run.text
    continued = re.findall(r"continuing from step (\d+), the newest that trainer and orchestrator both comp", run.text)
    assert [int(step) for step in continued] == [first, second]
    resumed = re.findall(r"Resuming orchestrator from checkpoint step (\d+)", run.text)
    assert resumed == continued
    remaining = [
        p.pid for p in psutil.process_iter() if str(tmp_path) in " ".join(_command(p)) and p.pid != os.getpid()
    ]
    assert remaining == [], "processes of the run remain"

    before, after = mean_reward(run.folder, "1..2"), mean_reward(run.folder, f"{STEPS - 1}..{STEPS}")
    print(f"reward {before:.3f} in steps 1 and 2, {after:.3f} in the last two; resumed from {continued}")
    assert after > before + 0.15
    check_names(run.folder)
    check_pages(run.folder)
    check_export(run.folder, tmp_path / "export")
    check_sealed(run.folder)


def _command(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def check_names(folder: Path) -> None:
    """Check what `export`, `warmup` and `view` read from the configs that `rl` wrote."""
    policy = str(folder / "configs/policy")
    assert (engine_of(folder), named_model(folder)) == ("prime-rl", policy)
    assert prime_rl_names(folder) == (policy, policy)
    config = run_config(folder)
    assert config.keys() == {"trainer", "orchestrator"} and config["trainer"]["model"]["lora"]["rank"] == 8


def check_pages(folder: Path) -> None:
    """Check that the pages show the run, its trials and their tokens as text."""
    store = open_store(folder)
    pages = TestClient(Site(store).app(), base_url="http://localhost")
    rows, _ = store.find(TrialFilter(kind="train"))
    for path, shown in (("/", "Prime-RL run"), (f"/trial/{rows[0].trial}", "sampled by version")):
        page = pages.get(path)
        assert page.status_code == 200 and shown in re.sub(r"<[^>]+>| +", " ", page.text)
        assert "token ids, because no tokenizer" not in page.text


def check_sealed(folder: Path) -> None:
    """Check that old steps are sealed, ten times smaller, then reduced, and that every trial keeps its row."""
    store, old = open_store(folder), TrialFilter(step="1", sort="-reward")
    rows, trial = store.find(old), store.find(old)[0][0].trial
    before, changed = store.detail(trial), time.time() - 7200
    for _, path in step_files(folder):
        os.utime(path, (changed, changed))
    size, limit = _bytes_of(folder, 1), EpisodeLimit(folder, max_mb=4000)
    newest = time.time() + 1  # a file's clock may lag behind ours by milliseconds
    os.utime(step_files(folder)[-1][1], (newest, newest))
    limit.check()
    assert _bytes_of(folder, 1) < size / 10
    store.refresh()
    after = store.detail(trial)
    assert before is not None and after is not None and len(before.turns) == len(after.turns) > 0
    assert [turn.answer for turn in after.turns] == [turn.answer for turn in before.turns]
    EpisodeLimit(folder, max_mb=0).reduce()
    store.refresh()
    reduced = store.detail(trial)
    assert store.find(old) == rows and reduced is not None and not reduced.turns


def _bytes_of(folder: Path, step: int) -> int:
    return sum(path.stat().st_size for path in folder.glob(f"rollouts/step_{step}/*/*/traces.jsonl*"))


def check_export(folder: Path, out: Path) -> None:
    """Check that the export has the adapter of the last step."""
    assert main(["export", str(folder), "--adapter", "--out", str(out)]) == 0
    ours = load_file(out / "adapter_model.safetensors")
    theirs = load_file(folder / f"broadcasts/step_{STEPS}/adapter_model.safetensors")
    assert {name.removeprefix("base_model.model.") for name in ours} == theirs.keys()
    assert all(theirs[name.removeprefix("base_model.model.")].equal(tensor) for name, tensor in ours.items())
    assert any("lora_B" in name and tensor.any() for name, tensor in ours.items())


def test_vllm_samples_with_each_adapter(prime_rl: PrimeRL, tmp_path: Path) -> None:
    if subprocess.run([prime_rl.python, "-c", "import vllm"], capture_output=True, check=False).returncode:
        pytest.skip("Prime-RL's environment has no vLLM; `tools/prime-rl FOLDER --vllm` installs one")
    words = ["--max-steps", "3", "--trainer.scheduler.decay-steps", "3"]
    words += ["--orchestrator.batch-size", str(BATCH), "--orchestrator.eval", "None"]
    with started(tmp_path, *words, "--vllm") as run:
        run.process.wait(600)
    assert run.process.returncode == 0, run.text[-6000:]
    log = (run.folder / "logs/latest/inference.log").read_text()
    assert "Initializing a V1 LLM engine (v0.26.0)" in log
    loaded = re.findall(r"Loaded new LoRA adapter: name '\S+', path '\S*/step_(\d+)'", log)
    assert list(map(int, loaded)) == list(range(len(loaded))) and len(loaded) >= 3
    rows = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    (first,) = [row["mismatch_kl/all/mean"] for row in rows if row["step"] == 1 and "mismatch_kl/all/mean" in row]
    assert first < 1e-4, "vLLM and the trainer have the same policy, both in float32"
