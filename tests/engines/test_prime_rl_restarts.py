"""A stalled run is ended and reported; with restarts it continues from its last checkpoint. Uses real processes."""

import signal

import pytest

from harbortrainer.config.reader import read
from harbortrainer.engines.prime_rl import process, stall_detector
from harbortrainer.engines.prime_rl.process_monitor import ProcessMonitor
from harbortrainer.engines.prime_rl.stall_detector import Stall
from harbortrainer.engines.prime_rl.start import LOG, start, watch_message
from harbortrainer.errors import UserError
from harbortrainer.trials.sandbox_starts import STARTS, StartState

pytestmark = pytest.mark.process
CHECKPOINTS = "[ckpt]\ninterval = 1"
SERVER = """
import multiprocessing, os, time
from pathlib import Path
def work():
    pid = Path(__file__).with_suffix(".new")
    pid.write_text(str(os.getpid()))
    pid.rename(pid.with_suffix(".pid"))
    time.sleep(300)
if __name__ == "__main__":
    print("MemoryError: no more", flush=True)
    worker = multiprocessing.get_context("spawn").Process(target=work)
    worker.start()
    time.sleep(300)
"""
STALLED_RUN = """
import os, signal, subprocess, sys, time
from pathlib import Path
if "--resume" in sys.argv:
    print("resumed", flush=True)
    sys.exit(0)
run_dir = Path(os.environ["HARBORTRAINER_TRIALS_DIR"]).parent
logs = run_dir / "logs" / "attempt_1"
(logs / "envs/train").mkdir(parents=True, exist_ok=True)
(run_dir / "logs/latest").symlink_to("attempt_1")
code = logs / "server.py"
code.write_text({server!r})
sleep = [sys.executable, "-c", "import time; time.sleep(300)"]
with (logs / "orchestrator.log").open("w") as log:
    subprocess.Popen(sleep, stdout=log)
with (logs / "envs/train/Tasks.log").open("w") as log:
    subprocess.Popen([sys.executable, str(code)], stdout=log, stderr=log)
while not (logs / "server.pid").exists():
    time.sleep(0.1)
time.sleep(2)
os.kill(int((logs / "server.pid").read_text()), signal.SIGKILL)
time.sleep(300)
"""


@pytest.fixture
def stalled_run(stand_in, monkeypatch):
    """An `rl` whose worker dies in the first attempt; stalls are detected quickly."""
    monkeypatch.setattr(stall_detector, "WORKER_MISSING_TIMEOUT_S", 1.0)
    monkeypatch.setattr(process, "CHECK_INTERVAL_S", 0.1)
    return stand_in(STALLED_RUN.format(server=SERVER))


def test_ends_run_with_dead_worker(run_file, stalled_run, capfd):
    assert start(read(run_file(CHECKPOINTS)), stalled_run, []) != 0
    err = capfd.readouterr().err
    assert "the run stalled and was ended: a worker of the train env server Tasks exited" in err
    assert "killed by signal 9" in err and "MemoryError: no more" in err and "--resume" in err
    assert "restarting" not in err


def test_restart_resumes_stalled_run(run_file, stalled_run, capfd):
    assert start(read(run_file(CHECKPOINTS)), stalled_run, [], restarts=2) == 0
    output = capfd.readouterr()
    assert "resumed" in output.out
    assert output.err.count("restarting (2 of 2 restarts left)") == 1


@pytest.mark.parametrize("trials_dir", [None, "elsewhere"])
def test_provider_given_up_ends_the_run(run_file, stand_in, tmp_path, monkeypatch, capfd, trials_dir):
    monkeypatch.setattr(process, "CHECK_INTERVAL_S", 0.1)
    folder = tmp_path / (trials_dir or "outputs/r/trials") / STARTS
    folder.mkdir(parents=True)
    denied = StartState(given_up=True, failing_since=0.0, denied_since=0.0, fault="AuthError: wrong key")
    (folder / "modal.json").write_text(denied.model_dump_json())
    code = f"""
import time
from pathlib import Path
state = Path({str(folder / "modal.json")!r})
print("earlier run's forgotten" if not state.read_text() else "not forgotten", flush=True)
state.write_text({denied.model_dump_json()!r})
time.sleep(120)
"""
    set_folder = ["--orchestrator.train.source.0.env.agent.harness.trials-dir", str(tmp_path / "elsewhere")]
    raw = read(run_file(CHECKPOINTS), set_folder if trials_dir else [])
    assert start(raw, stand_in(code), [], restarts=2) != 0
    out, err = capfd.readouterr()
    assert out.count("earlier run's forgotten") == 1 and "restart" not in err, "a restart has the same key"
    assert "check the provider's key, its permissions and the account's payment; continue from" in err
    assert "modal denies every start of a sandbox, the last with AuthError: wrong key" in err


def test_interrupt_of_a_stalled_run_that_ends_prevents_a_restart(run_file, stand_in, monkeypatch, capfd):
    def stalled_when_ready(monitor: ProcessMonitor) -> Stall | None:
        log = monitor.run_dir / LOG
        ready = log.is_file() and "ready" in log.read_text()
        return Stall("nothing returned", "orchestrator", "see the logs") if ready else None

    monkeypatch.setattr(process, "CHECK_INTERVAL_S", 0.1)
    monkeypatch.setattr(ProcessMonitor, "check", stalled_when_ready)
    slow = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: os.kill(os.getppid(), signal.SIGINT))
print("ready", flush=True)
while True:
    time.sleep(0.05)
"""
    assert start(read(run_file(CHECKPOINTS)), stand_in(slow), [], restarts=2) == 128 + signal.SIGKILL
    err = capfd.readouterr().err
    assert "the run stalled and was ended: nothing returned" in err and "restarting" not in err


def test_restarts_are_counted(run_file, stand_in, capfd):
    assert start(read(run_file(CHECKPOINTS)), stand_in("import sys; print(sys.argv); sys.exit(3)"), [], restarts=2) == 3
    out, err = capfd.readouterr()
    assert (out.count("'@'"), out.count("'--resume'")) == (3, 2)
    assert [f"({left} of 2 restarts left)" in err for left in (2, 1, 0)] == [True, True, False]


def test_restarts_need_name_and_checkpoints(run_file, stand_in, tmp_path):
    checkout = stand_in("")
    with pytest.raises(UserError, match="--restarts: the run writes no checkpoints to continue from"):
        start(read(run_file()), checkout, [], restarts=1)
    nameless = tmp_path / "nameless.toml"
    nameless.write_text(run_file(CHECKPOINTS).read_text().replace('name = "r"', ""))
    with pytest.raises(UserError, match="--restarts: only a run with a name can continue"):
        start(read(nameless), checkout, [], restarts=1)


@pytest.mark.parametrize("key", ["step = 2", "dir = '/other/checkpoints/step_2'"])
def test_restarts_refuse_a_checkpoint_that_each_of_them_would_go_back_to(run_file, stand_in, key):
    path = run_file(f"resume = {{ {key} }}\n{CHECKPOINTS}")
    with pytest.raises(UserError, match=f"would go back to the checkpoint of resume.{key.split()[0]}; remove"):
        start(read(path), stand_in("import sys; sys.exit(3)"), [], restarts=1)


def test_watch_message():
    assert "90 min" in watch_message(5400)
    assert "no time limit" in watch_message(None)
