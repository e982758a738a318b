"""Prime-RL's real `rl`, orchestrator and env servers under our launcher: a dead worker ends the run, or restarts it."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from conftest import MAX_LENGTH, PrimeRL
from fakes import make_task
from orchestrator_endpoints import OrchestratorSampler
from test_orchestrator import VERDICT, free_port

pytestmark = pytest.mark.prime_rl

BOUND_S = 180
"""For the watch to be sure, `rl` to end, and what is left to be cleaned up."""

LAUNCH = """
import sys
from pathlib import Path
from harbortrainer.config.reader import read
from harbortrainer.engines.prime_rl import command
from harbortrainer.engines.prime_rl.checkout import Checkout
from harbortrainer.engines.prime_rl.start import start
command.find_uv = lambda: None
sys.exit(start(read(sys.argv[1]), Checkout(Path(sys.argv[2])), [], restarts=int(sys.argv[3]), grace_s=30))
"""
RUN_FILE = """
output_dir = "{folder}/outputs"
max_steps = 1000
seq_len = {length}
[run]
name = "r"
[model]
name = "{policy}"
[ckpt]
interval = 1
[deployment]
num_train_gpus = 1
[rollout_transport]
type = "filesystem"
[weight_broadcast]
type = "filesystem"
[trainer.model.lora]
rank = 4
[orchestrator]
batch_size = 8
group_size = 4
env_server_base_port = {port}
[orchestrator.model.client]
base_url = "{url}/v1"
[orchestrator.renderer]
name = "qwen3"
[orchestrator.concurrency]
initial_inflight = 8
max_inflight = 8
[orchestrator.train.sampling]
max_completion_tokens = 40
[[orchestrator.train.source]]
name = "Tasks"
env = {env}
[orchestrator.eval]
interval = 1
group_size = 2
sampling = {{ max_completion_tokens = 40 }}
[[orchestrator.eval.source]]
name = "held"
env = {env}
"""
ENV = (
    '{{ taskset = {{ id = "harbor_env", tasks_dir = "{folder}/tasks", may_overlap = true }}, '
    'agent = {{ max_turns = 2, harness = {{ id = "harbor_env", environment_type = "local", n_parallel_envs = 3 }} }} }}'
)


class Launched:
    """Our launcher as a process, with a checkout of Prime-RL whose programs run on a CPU."""

    def __init__(self, prime_rl: PrimeRL, folder: Path, policy: Path, url: str, *, restarts: int) -> None:
        for name in ("one", "two"):
            make_task(folder / "tasks" / name, test=VERDICT, extra=f"# {name}")
        self.run_dir = folder / "outputs/r"
        env = ENV.format(folder=folder)
        file = folder / "run.toml"
        text = RUN_FILE.format(folder=folder, length=MAX_LENGTH, policy=policy, port=free_port(), url=url, env=env)
        file.write_text(text)
        self.lines: list[str] = []
        environment = os.environ | {
            "PYTHONPATH": prime_rl.path,
            "CUDA_VISIBLE_DEVICES": "0",
            "UV_PROJECT_ENVIRONMENT": str(programs(prime_rl, folder / "programs")),
            "HF_HUB_OFFLINE": "1",
        }
        words = [sys.executable, "-c", LAUNCH, str(file), str(checkout(folder)), str(restarts)]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(words, stdout=pipe, stderr=subprocess.STDOUT, text=True, env=environment)
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        self.lines.extend(self.process.stdout)

    @property
    def text(self) -> str:
        return "".join(self.lines)

    def until(self, done, within: float = 900) -> None:
        """Wait, as long as the launcher lives."""
        deadline = time.monotonic() + within
        while not done():
            assert self.process.poll() is None, self.text[-6000:]
            assert time.monotonic() < deadline, self.text[-6000:]
            time.sleep(0.5)

    def steps(self) -> int:
        """The last step that has a checkpoint."""
        folders = self.run_dir.glob("checkpoints/step_*")
        return max((int(path.name.removeprefix("step_")) for path in folders), default=0)

    def kill_a_worker(self, split: str) -> int:
        """What the kernel does when memory runs out."""
        log = next((self.run_dir / "logs/latest").resolve().glob(f"envs/{split}/*.log"))
        workers = [
            process
            for process in psutil.Process(self.process.pid).children(recursive=True)
            if any("spawn_main" in word for word in _cmdline(process)) and _stdout(process) == log
        ]
        # The pool that is Prime-RL's default starts with one.
        (worker,) = workers
        os.kill(worker.pid, signal.SIGKILL)
        return worker.pid


def _stdout(process: psutil.Process) -> Path | None:
    try:
        return Path(f"/proc/{process.pid}/fd/1").readlink()
    except OSError:
        return None


def checkout(folder: Path) -> Path:
    (folder / "prime-rl").mkdir()
    (folder / "prime-rl/pyproject.toml").write_text("")
    return folder / "prime-rl"


def programs(prime_rl: PrimeRL, folder: Path) -> Path:
    """An environment whose `rl`, `env-server` and `orchestrator` are Prime-RL's, and whose trainer is the stand-in."""
    (folder / "bin").mkdir(parents=True)
    here = Path(__file__).parent
    for name in ("rl", "env-server", "orchestrator"):
        write(folder / "bin" / name, f'exec {prime_rl.python} {here / "start.py"} {name} "$@"')
    write(folder / "bin/torchrun", f'PYTHONPATH= exec {sys.executable} {here / "stand_in_trainer.py"} "$@"')
    return folder


def write(program: Path, line: str) -> None:
    program.write_text(f"#!/bin/sh\n{line}\n")
    program.chmod(0o755)


@contextmanager
def launched(prime_rl: PrimeRL, folder: Path, policy: Path, *, restarts: int) -> Generator[Launched]:
    with OrchestratorSampler(policy, device="cpu", max_model_len=MAX_LENGTH) as sampler:
        run = Launched(prime_rl, folder, policy, sampler.url, restarts=restarts)
        try:
            yield run
        finally:
            if run.process.poll() is None:
                run.process.send_signal(signal.SIGTERM)
                run.process.wait(90)


def test_a_killed_worker_ends_the_run_and_a_restart_goes_on(prime_rl: PrimeRL, tmp_path: Path, policy: Path) -> None:
    with launched(prime_rl, tmp_path, policy, restarts=1) as run:
        run.until(lambda: run.steps() >= 1)
        before, trainer = run.steps(), run.kill_a_worker("train")
        run.until(lambda: stood_still("train env server Tasks", trainer) in run.text, within=BOUND_S)
        run.until(lambda: run.steps() > before + 1)
        evaluator = run.kill_a_worker("eval")
        assert run.process.wait(BOUND_S) == 1, "no restarts are left"
    run.reader.join(10)
    assert stood_still("eval env server held", evaluator) in run.text
    assert run.text.count("killed by signal 9") == run.text.count("the last lines:") == 2
    assert run.text.count("goes on from the last checkpoint") == 1 and "--restarts" in run.text
    resumed = re.findall(r"Resuming orchestrator from checkpoint step (\d+)", run.text)
    assert [int(step) >= before for step in resumed] == [True]
    left = [p.pid for p in psutil.process_iter() if str(tmp_path) in " ".join(_cmdline(p)) and p.pid != os.getpid()]
    assert left == [], "nothing of it is left"


def stood_still(name: str, pid: int) -> str:
    return f"the run stood still and was ended: a worker of the {name} is gone (process {pid})"


def _cmdline(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []
