"""A dead env server worker ends or restarts a run of Prime-RL's real `rl`, orchestrator and env servers."""

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
from test_orchestrator import RANDOM_REWARD, free_port

pytestmark = pytest.mark.prime_rl

STOP_TIMEOUT_S = 180
"""Time for the stall to be detected, `rl` to end, and leftover processes to be removed."""

LAUNCH = """
import sys
from pathlib import Path
from harbortrainer.config.reader import read
from harbortrainer.engines.prime_rl import checkout
from harbortrainer.engines.prime_rl.checkout import Checkout
from harbortrainer.engines.prime_rl.start import start
checkout.find_uv = lambda: None
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


class LauncherProcess:
    """Our launcher as a process, with Prime-RL's programs on a CPU."""

    def __init__(self, prime_rl: PrimeRL, folder: Path, policy: Path, url: str, *, restarts: int) -> None:
        for name in ("one", "two"):
            make_task(folder / "tasks" / name, test=RANDOM_REWARD, extra=f"# {name}")
        self.run_dir = folder / "outputs/r"
        env = ENV.format(folder=folder)
        file = folder / "run.toml"
        text = RUN_FILE.format(folder=folder, length=MAX_LENGTH, policy=policy, port=free_port(), url=url, env=env)
        file.write_text(text)
        self.lines: list[str] = []
        environment = os.environ | {
            "PYTHONPATH": prime_rl.path,
            "CUDA_VISIBLE_DEVICES": "0",
            "UV_PROJECT_ENVIRONMENT": str(write_programs(prime_rl, folder / "programs")),
            "HF_HUB_OFFLINE": "1",
        }
        command = [sys.executable, "-c", LAUNCH, str(file), str(make_checkout(folder)), str(restarts)]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, stdout=pipe, stderr=subprocess.STDOUT, text=True, env=environment)
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        self.lines.extend(self.process.stdout)

    @property
    def text(self) -> str:
        return "".join(self.lines)

    def wait_until(self, condition, timeout_s: float = 900) -> None:
        """Wait until the condition holds; fail if the launcher ends first."""
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert self.process.poll() is None, self.text[-6000:]
            assert time.monotonic() < deadline, self.text[-6000:]
            time.sleep(0.5)

    def steps(self) -> int:
        """Return the last step whose checkpoint the trainer and the orchestrator have completed."""
        complete = self.run_dir.glob("checkpoints/step_*/trainer/.metadata")
        return max((int(path.parts[-3].removeprefix("step_")) for path in complete), default=0)

    def kill_worker(self, split: str) -> int:
        """Kill the split's env server worker as the kernel does when memory runs out; return its process id."""
        log = next((self.run_dir / "logs/latest").resolve().glob(f"envs/{split}/*.log"))
        workers = [
            process
            for process in psutil.Process(self.process.pid).children(recursive=True)
            if any("spawn_main" in argument for argument in _cmdline(process)) and _stdout(process) == log
        ]
        # Prime-RL's default pool starts with one worker; the others are its forked children.
        worker = min(workers, key=psutil.Process.create_time)
        os.kill(worker.pid, signal.SIGKILL)
        return worker.pid


def _stdout(process: psutil.Process) -> Path | None:
    try:
        return Path(f"/proc/{process.pid}/fd/1").readlink()
    except OSError:
        return None


def make_checkout(folder: Path) -> Path:
    (folder / "prime-rl").mkdir()
    (folder / "prime-rl/pyproject.toml").write_text("")
    return folder / "prime-rl"


def write_programs(prime_rl: PrimeRL, folder: Path) -> Path:
    """Write an environment with Prime-RL's `rl`, `env-server` and `orchestrator`, and the stand-in trainer."""
    (folder / "bin").mkdir(parents=True)
    here = Path(__file__).parent
    for name in ("rl", "env-server", "orchestrator"):
        write_program(folder / "bin" / name, f'exec {prime_rl.python} {here / "start.py"} {name} "$@"')
    write_program(folder / "bin/torchrun", f'PYTHONPATH= exec {sys.executable} {here / "stand_in_trainer.py"} "$@"')
    return folder


def write_program(program: Path, line: str) -> None:
    program.write_text(f"#!/bin/sh\n{line}\n")
    program.chmod(0o755)


@contextmanager
def launched(prime_rl: PrimeRL, folder: Path, policy: Path, *, restarts: int) -> Generator[LauncherProcess]:
    with OrchestratorSampler(policy, device="cpu", max_model_len=MAX_LENGTH) as sampler:
        run = LauncherProcess(prime_rl, folder, policy, sampler.url, restarts=restarts)
        try:
            yield run
        finally:
            if run.process.poll() is None:
                run.process.send_signal(signal.SIGTERM)
                run.process.wait(90)


def test_killed_worker_ends_run_and_restart_resumes_it(prime_rl: PrimeRL, tmp_path: Path, policy: Path) -> None:
    with launched(prime_rl, tmp_path, policy, restarts=1) as run:
        run.wait_until(lambda: run.steps() >= 1)
        before, killed = run.steps(), run.kill_worker("train")
        run.wait_until(lambda: stall_message("train env server Tasks", killed) in run.text, timeout_s=STOP_TIMEOUT_S)
        run.wait_until(lambda: run.steps() > before + 1)
        killed = run.kill_worker("eval")
        assert run.process.wait(STOP_TIMEOUT_S) != 0, "no restarts are left"
    run.reader.join(10)
    assert stall_message("eval env server held", killed) in run.text
    assert run.text.count("killed by signal 9") == run.text.count("the last lines:") == 2
    assert run.text.count("restarting (") == 1 and "--restarts" in run.text
    resumed = re.findall(r"Resuming orchestrator from checkpoint step (\d+)", run.text)
    assert [int(step) >= before for step in resumed] == [True]
    remaining = [
        p.pid for p in psutil.process_iter() if str(tmp_path) in " ".join(_cmdline(p)) and p.pid != os.getpid()
    ]
    assert remaining == [], "processes of the run remain"


def stall_message(name: str, pid: int) -> str:
    return f"the run stalled and was ended: a worker of the {name} exited (process {pid})"


def _cmdline(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []
