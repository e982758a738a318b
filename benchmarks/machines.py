"""Play trials on two machines, kill the server of one, and print what became of its trials.

    .venv/bin/python benchmarks/machines.py          a minute and a half, as root
    .venv/bin/python benchmarks/machines.py --gone   a minute more: the second machine does not come back

The machines are network namespaces on one bridge. One has the model and the requests; two run `harbortrainer
serve-env`. Sandboxes and model only wait (`simulated_provider.py`, `waiting_model.py`), and each trial has a reward of
its own, so that another trial's reward is noticed. The environment server of the second machine is killed while its
trials run. As in training, its `serve-env` starts it again, and its trials are played again there. With `--gone`
`serve-env` is killed too; the run has to end with an error that names the machine.

The exit code is 1 if a reward is another trial's, if a trial of a machine that is not gone has none, or if the kill
interrupted no trial.
"""

import argparse
import asyncio
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")

import psutil
from rich.console import Console
from rich.table import Table
from scripted_model import renderer_config, save_tokenizer
from trials import write_task
from verifiers.v1.clients import TrainClientConfig
from verifiers.v1.episode import WireEpisode
from verifiers.v1.serve import EnvClient
from verifiers.v1.utils.loaders import load_taskset, resolve_env_config
from waiting_model import SEED_CHARS, answer_of, waiting_model

from harbortrainer.engines.env_server import STARTUP_S
from harbortrainer.engines.env_server.remote_server import RemoteServer, ServerLostError
from harbortrainer.environment.request_check import POLICY_KEY_VARIABLE, RUN_KEY_VARIABLE, RunKey
from harbortrainer.environment.taskset import request_data
from harbortrainer.environment.verifiers_compat import SamplingConfig
from harbortrainer.errors import EXIT_INTERRUPTED

_STOP_S = 30.0
_HERE = Path(__file__).resolve().parent
_NAMES = [f"machines-{os.getpid()}-{role}" for role in ("train", "env1", "env2")]
_RUN_FILE = """
[run]
name = "machines"
[[orchestrator.train.source]]
name = "far"
serve = {{ address = "tcp://{host}:6000", pool = {{ type = "static", num_workers = 2 }} }}
env.taskset = {{ id = "harbor_env", tasks_dir = "tasks" }}
env.agent.harness = {{ environment_type = "simulated_provider:SimulatedSandbox" }}
"""


def _ip(words: str) -> None:
    subprocess.run(["ip", *words.split()], check=True)


@contextmanager
def machines() -> Generator[list[str]]:
    """Create the namespaces, and move this process into the first. Yield their addresses."""
    train, hosts = _NAMES[0], [f"10.77.0.{number}" for number in range(1, 4)]
    before = os.open("/proc/self/ns/net", os.O_RDONLY)
    try:
        for name in _NAMES:
            _ip(f"netns add {name}")
            _ip(f"-n {name} link set lo up")
        _ip(f"-n {train} link add bridge type bridge")
        _ip(f"-n {train} addr add {hosts[0]}/24 dev bridge")
        _ip(f"-n {train} link set bridge up")
        for name, host in zip(_NAMES[1:], hosts[1:], strict=True):
            port = name.rpartition("-")[2]
            _ip(f"link add eth netns {name} type veth peer name {port} netns {train}")
            _ip(f"-n {name} addr add {host}/24 dev eth")
            _ip(f"-n {name} link set eth up")
            _ip(f"-n {train} link set {port} master bridge up")
        with Path(f"/run/netns/{train}").open() as own:
            os.setns(own, os.CLONE_NEWNET)
        yield hosts
    finally:
        os.setns(before, os.CLONE_NEWNET)
        for name in _NAMES:
            subprocess.run(["ip", "netns", "del", name], check=False)


@contextmanager
def serve_env(name: str, host: str, folder: Path) -> Generator[subprocess.Popen[str]]:
    """Run `serve-env` in a namespace; yield its process, whose output has a line once it serves."""
    write_task(folder / "tasks" / "write-answer")
    (folder / "run.toml").write_text(_RUN_FILE.format(host=host))
    code = "import sys; from harbortrainer.cli import main; sys.exit(main())"
    command = ["ip", "netns", "exec", name, sys.executable, "-c", code, "serve-env", "--config", "run.toml"]
    variables = os.environ | {"PYTHONPATH": str(_HERE)}
    process = subprocess.Popen(command, cwd=folder, env=variables, stdout=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            kill_tree(process.pid)
            process.wait()


def kill_tree(pid: int) -> None:
    """Kill a process and its descendants."""
    process = psutil.Process(pid)
    for each in (process, *process.children(recursive=True)):
        each.kill()


@dataclass
class Machine:
    """A machine that runs trials, and what became of them."""

    host: str
    serve_env: subprocess.Popen[str]
    completed: int = 0
    lost: int = 0
    """Trials that its server's end interrupted."""
    wrong: int = 0
    """Trials without a reward, or with another than their own."""
    killed: float = 0.0
    """Monotonic time of the kill."""
    error: str = ""
    """Why the run ends, if it does not answer any more."""
    graded: asyncio.Event = field(default_factory=asyncio.Event)
    """Whether a trial has ended."""

    def count(self, episode: WireEpisode) -> None:
        """Compare the reward of an episode with its trial's own."""
        trace = episode.traces[-1] if episode.traces else None
        right = trace is not None and episode.ok and abs(trace.reward - answer_of(trace.id[:SEED_CHARS]) / 1000) < 1e-6
        self.completed, self.wrong = self.completed + right, self.wrong + (not right)
        self.graded.set()

    async def wait(self) -> None:
        """Wait until it serves."""
        assert self.serve_env.stdout is not None
        while line := await asyncio.to_thread(self.serve_env.stdout.readline):
            if line.startswith("serving "):
                return
        raise SystemExit(f"serve-env at {self.host} ended before it served")

    def kill(self, *, gone: bool) -> None:
        """Kill its environment server, without a chance to stop its workers; all processes if it is gone."""
        self.killed = time.monotonic()
        (server,) = psutil.Process(self.serve_env.pid).children()
        if gone:
            kill_tree(self.serve_env.pid)
        else:
            server.kill()


async def play(args: argparse.Namespace, machine: Machine, policy: TrainClientConfig, folder: Path) -> None:
    """Play trials on a machine, each again if its server ends, until the machine has been silent for too long."""
    connection, key = EnvClient(f"tcp://{machine.host}:6000"), RunKey(os.environ[RUN_KEY_VARIABLE])
    await connection.wait_for_server_startup(timeout=STARTUP_S)
    remote = RemoteServer(machine.host, connection)
    taskset = {"id": "harbor_env", "tasks_dir": str(folder / "tasks")}
    (task,) = load_taskset(resolve_env_config({"taskset": taskset}).taskset)
    sampling = SamplingConfig(temperature=1.0, max_tokens=512)

    async def lane() -> None:
        left = args.waves
        while left:
            try:
                request = connection.run(policy, "waiting", sampling, request_data(task, key, policy))
                machine.count(await remote.guard(request))
                left -= 1
            except ServerLostError:
                if not remote.alive:
                    return
                machine.lost += 1

    await asyncio.gather(*(lane() for _ in range(args.at)))
    if not remote.alive:
        after_s = time.monotonic() - machine.killed
        machine.error = f"{after_s:.0f} s after the kill: {remote.exit_error()}"
    await remote.close()
    await connection.close()


async def play_all(args: argparse.Namespace, found: list[Machine], policy: TrainClientConfig, folder: Path) -> None:
    """Play on all machines, and kill the last one, or its server only."""
    await asyncio.gather(*(machine.wait() for machine in found))
    playing = [asyncio.create_task(play(args, machine, policy, folder)) for machine in found]
    await asyncio.wait([*playing, asyncio.create_task(found[-1].graded.wait())], return_when=asyncio.FIRST_COMPLETED)
    found[-1].kill(gone=args.gone)
    await asyncio.gather(*playing)


def report(args: argparse.Namespace, found: list[Machine]) -> bool:
    """Print what became of the trials; return whether all is as it should be."""
    asked = args.at * args.waves
    table = Table("machine", "trials", "completed", "interrupted", "wrong or without reward")
    for machine in found:
        what = "kept" if not machine.killed else "gone" if args.gone else "server killed"
        figures = (asked, machine.completed, machine.lost, machine.wrong)
        table.add_row(f"{machine.host}, {what}", *map(str, figures))
    Console().print(table)
    kept, killed = found
    if killed.error:
        print(killed.error)
    right = kept.completed == asked and not kept.lost and not kept.wrong and killed.lost and not killed.wrong
    ended = killed.host in killed.error if args.gone else killed.completed == asked
    return bool(right and ended)


def main() -> int:
    """Play, and print what became of the trials."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--at", type=int, default=16, help="trials in flight on each machine")
    parser.add_argument("--waves", type=int, default=3, help="trials that follow one another, for each in flight")
    parser.add_argument("--gone", action="store_true", help="kill serve-env of the second machine too")
    args = parser.parse_args()
    if os.geteuid() or not shutil.which("ip"):
        print("network namespaces need root and `ip` (iproute2)", file=sys.stderr)
        return 2
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    os.environ |= {RUN_KEY_VARIABLE: secrets.token_hex(32), POLICY_KEY_VARIABLE: "key of the policy"}
    try:
        with tempfile.TemporaryDirectory(prefix="bench-machines-") as scratch, machines() as hosts:
            top = Path(scratch)
            save_tokenizer(top / "tokenizer")
            write_task(top / "train" / "tasks" / "write-answer")
            with (
                waiting_model(5, 0.5, 1.5, top / "tokenizer", hosts[0]) as url,
                serve_env(_NAMES[1], hosts[1], top / "env1") as first,
                serve_env(_NAMES[2], hosts[2], top / "env2") as second,
            ):
                found = [Machine(hosts[1], first), Machine(hosts[2], second)]
                policy = TrainClientConfig(
                    base_url=url,
                    renderer=renderer_config("qwen3"),
                    renderer_model_name=str(top / "tokenizer"),
                    api_key_var=POLICY_KEY_VARIABLE,
                )
                asyncio.run(play_all(args, found, policy, top / "train"))
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    return not report(args, found)


if __name__ == "__main__":
    sys.exit(main())
