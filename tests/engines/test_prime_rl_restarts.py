"""A run that stands still is ended and told; with restarts it goes on from its last checkpoint, with real processes."""

import pytest

from harbortrainer.config.reader import read
from harbortrainer.engines.prime_rl import process, standstill
from harbortrainer.engines.prime_rl.start import expectation, start
from harbortrainer.errors import UserError

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
STANDS_STILL = """
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
def stands_still(stand_in, monkeypatch):
    """An `rl` of which a worker dies, once; watched more closely than usual."""
    monkeypatch.setattr(standstill, "GONE_S", 1.0)
    monkeypatch.setattr(process, "LOOK_S", 0.1)
    return stand_in(STANDS_STILL.format(server=SERVER))


def test_a_run_without_one_of_its_workers_is_ended_with_its_last_lines(run_file, stands_still, capfd):
    assert start(read(run_file(CHECKPOINTS)), stands_still, []) != 0
    said = capfd.readouterr().err
    assert "the run stood still and was ended: a worker of the train env server Tasks is gone" in said
    assert "killed by signal 9" in said and "MemoryError: no more" in said and "--resume" in said
    assert "goes on" not in said


def test_a_restart_resumes_it(run_file, stands_still, capfd):
    assert start(read(run_file(CHECKPOINTS)), stands_still, [], restarts=2) == 0
    told = capfd.readouterr()
    assert "resumed" in told.out
    assert told.err.count("goes on from the last checkpoint (2 of 2 restarts left)") == 1


def test_restarts_are_counted(run_file, stand_in, capfd):
    assert start(read(run_file(CHECKPOINTS)), stand_in("import sys; print(sys.argv); sys.exit(3)"), [], restarts=2) == 3
    out, err = capfd.readouterr()
    assert (out.count("'@'"), out.count("'--resume'")) == (3, 2)
    assert [f"({left} of 2 restarts left)" in err for left in (2, 1, 0)] == [True, True, False]


def test_restarts_need_something_to_go_on_from(run_file, stand_in, tmp_path):
    checkout = stand_in("")
    with pytest.raises(UserError, match="--restarts: there are no checkpoints to go on from"):
        start(read(run_file()), checkout, [], restarts=1)
    nameless = tmp_path / "nameless.toml"
    nameless.write_text(run_file(CHECKPOINTS).read_text().replace('name = "r"', ""))
    with pytest.raises(UserError, match="--restarts: a run goes on only under its name"):
        start(read(nameless), checkout, [], restarts=1)


def test_the_user_is_told_what_the_watch_goes_by():
    assert "90 min" in expectation(5400)
    assert "nothing bounds" in expectation(None)
