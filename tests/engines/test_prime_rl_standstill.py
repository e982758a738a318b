"""When a run on Prime-RL counts as standing still: the states, and what is seen of real processes."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from harbortrainer.engines.prime_rl.lookout import Lookout, how_it_ended
from harbortrainer.engines.prime_rl.standstill import GONE_S, Sight, StandstillWatch
from harbortrainer.runs.label import RUN_VARIABLE

TRAIN, EVAL = "train env server a", "eval env server b"
BOTH = {TRAIN: frozenset({1, 2}), EVAL: frozenset({3})}


def sight(at: float, workers=BOTH, *, orchestrator: bool = True, in_flight: int = 0, returned: object = 0) -> Sight:
    return Sight(at=at, orchestrator=orchestrator, workers=workers, in_flight=in_flight, returned=returned)


@pytest.mark.parametrize(("name", "pid"), [(TRAIN, 2), (EVAL, 3)])
def test_a_worker_that_stays_away_ends_the_run_with_its_name(name: str, pid: int) -> None:
    watch = StandstillWatch(None)
    less = BOTH | {name: BOTH[name] - {pid}}
    assert watch.look(sight(0)) is None
    assert watch.look(sight(1, less)) is None
    assert watch.look(sight(GONE_S, less)) is None, "not yet"
    found = watch.look(sight(1 + GONE_S, less))
    assert found is not None and found.name == name and found.pid == pid
    assert name in found.what and str(pid) in found.what


def test_workers_that_come_later_are_no_loss() -> None:
    watch = StandstillWatch(None)
    for at in range(0, 100, 5):
        assert watch.look(sight(at, {TRAIN: frozenset(range(1 + at // 10))})) is None


def test_an_orderly_end_is_no_standstill() -> None:
    watch = StandstillWatch(10)
    assert watch.look(sight(0, in_flight=4)) is None
    for at in range(1, 100):
        assert watch.look(sight(at, {TRAIN: frozenset()}, orchestrator=False, in_flight=4)) is None, "it ended first"
    watch.look(sight(200))
    for at in range(201, 300):
        assert watch.look(sight(at, {EVAL: BOTH[EVAL]})) is None, "the server ended with its workers"


def test_no_trial_for_longer_than_one_may_take_ends_the_run() -> None:
    watch = StandstillWatch(600)
    assert watch.look(sight(0, in_flight=8)) is None
    assert watch.look(sight(599, in_flight=8)) is None
    assert watch.look(sight(600, in_flight=8, returned=1)) is None, "one came back"
    assert watch.look(sight(1200, in_flight=8, returned=1)) is None
    found = watch.look(sight(1201, in_flight=8, returned=1))
    assert found is not None and "waits for 8" in found.what and "10 min" in found.what


def test_a_trainer_that_takes_its_time_is_no_standstill() -> None:
    watch = StandstillWatch(600)
    watch.look(sight(0, in_flight=8))
    for at in range(100, 10_000, 100):
        assert watch.look(sight(at, in_flight=0)) is None, "nothing is owed"
    assert watch.look(sight(10_000, in_flight=8)) is None, "the clock starts when there is"


def test_where_nothing_bounds_a_trial_only_workers_are_watched() -> None:
    watch = StandstillWatch(None)
    assert all(watch.look(sight(at, in_flight=8)) is None for at in range(0, 100_000, 1000))


SERVER = """
import multiprocessing, os, sys, time
def work():
    time.sleep(300)
if __name__ == "__main__":
    spawn = multiprocessing.get_context("spawn")
    workers = [spawn.Process(target=work) for _ in range(2)]
    for worker in workers:
        worker.start()
    time.sleep(300)
"""


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    (tmp_path / "logs/attempt_1/envs/train").mkdir(parents=True)
    (tmp_path / "logs/latest").symlink_to("attempt_1")
    (tmp_path / "server.py").write_text(SERVER)
    return tmp_path


def start(run_dir: Path, log: str, *words: str) -> subprocess.Popen[bytes]:
    with (run_dir / "logs/attempt_1" / log).open("ab") as out:
        variables = os.environ | {RUN_VARIABLE: f"test-{run_dir.name}"}
        return subprocess.Popen([sys.executable, *words], stdout=out, stderr=out, env=variables)


def once_seen(lookout: Lookout) -> Sight:
    """The first sight of the orchestrator: for an instant after it is there, /proc shows no environment of it."""
    deadline = time.monotonic() + 60
    while not (seen := lookout.sight()).orchestrator:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return seen


def test_real_processes_are_told_apart_by_their_logs(run_dir: Path) -> None:
    lookout = Lookout(f"test-{run_dir.name}", run_dir, None)
    assert lookout.sight().workers == {} and not lookout.sight().orchestrator
    processes = [
        start(run_dir, "envs/train/a.log", str(run_dir / "server.py")),
        start(run_dir, "orchestrator.log", "-c", "import time; time.sleep(300)"),
    ]
    try:
        deadline = time.monotonic() + 60
        while len(lookout.sight().workers.get(TRAIN, ())) < 2:
            assert time.monotonic() < deadline
            time.sleep(0.1)
        workers = lookout.sight().workers[TRAIN]
        assert lookout.sight().orchestrator and processes[0].pid not in workers
        killed = min(workers)
        os.kill(killed, signal.SIGKILL)
        while killed in lookout.sight().workers[TRAIN]:
            assert time.monotonic() < deadline
        assert lookout.sight().workers[TRAIN] == workers - {killed}
        assert how_it_ended(killed) == "killed by signal 9"
    finally:
        for pid in lookout.sight().workers.get(TRAIN, ()):
            os.kill(pid, signal.SIGKILL)
        for process in processes:
            process.kill()
            process.wait()


def test_what_is_in_flight_and_what_came_back_is_read_from_what_the_orchestrator_writes(run_dir: Path) -> None:
    line = "\x1b[32m12:00\x1b[0m INFO Train batch {}/8 (+2 buffered); {} inflight episodes (train={}, eval=0)\n"
    log = run_dir / "logs/attempt_1/orchestrator.log"
    log.write_text(line.format(3, 9, 9))
    process = start(run_dir, "orchestrator.log", "-c", "import time; time.sleep(300)")
    try:
        lookout = Lookout(f"test-{run_dir.name}", run_dir, None)
        first = once_seen(lookout)
        assert first.in_flight == 9
        traces = run_dir / "rollouts/step_1/train/all/traces.jsonl"
        traces.parent.mkdir(parents=True)
        traces.write_text("{}\n")
        second = lookout.sight()
        assert second.returned != first.returned
        assert lookout.sight().returned == second.returned
        with log.open("a") as more:
            more.write(line.format(4, 5, 5) + "INFO something else\n")
        assert lookout.sight().in_flight == 5 and lookout.sight().returned != second.returned
    finally:
        process.kill()
        process.wait()
