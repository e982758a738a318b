"""Stall detection for runs on Prime-RL: decisions on snapshots, and snapshots of real processes."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from harbortrainer.engines.cleanup import end_processes, processes_of
from harbortrainer.engines.prime_rl import stall_detector
from harbortrainer.engines.prime_rl.failure_report import stall_report
from harbortrainer.engines.prime_rl.process_monitor import IN_FLIGHT, SPAWNED, ProcessMonitor, exit_status
from harbortrainer.engines.prime_rl.stall_detector import WORKER_MISSING_TIMEOUT_S, Snapshot, StallDetector
from harbortrainer.runs.label import RUN_VARIABLE
from harbortrainer.trials.sandbox_starts import STARTS, StartState

TRAIN, EVAL = "train env server a", "eval env server b"
BOTH = {TRAIN: frozenset({1, 2}), EVAL: frozenset({3})}


def snapshot(
    at: float, workers=BOTH, *, orchestrator: bool = True, in_flight: int = 0, returned: object = 0
) -> Snapshot:
    return Snapshot(at=at, orchestrator=orchestrator, workers=workers, in_flight=in_flight, returned=returned)


@pytest.mark.parametrize(("name", "pid"), [(TRAIN, 2), (EVAL, 3)])
def test_missing_worker_is_a_stall(name: str, pid: int) -> None:
    detector = StallDetector(None)
    remaining = BOTH | {name: BOTH[name] - {pid}}
    assert detector.update(snapshot(0)) is None
    assert detector.update(snapshot(1, remaining)) is None
    assert detector.update(snapshot(WORKER_MISSING_TIMEOUT_S, remaining)) is None, "not yet"
    stall = detector.update(snapshot(1 + WORKER_MISSING_TIMEOUT_S, remaining))
    assert stall is not None and stall.name == name and stall.pid == pid
    assert name in stall.what and str(pid) in stall.what


def test_new_workers_are_no_stall() -> None:
    detector = StallDetector(None)
    for at in range(0, 100, 5):
        assert detector.update(snapshot(at, {TRAIN: frozenset(range(1 + at // 10))})) is None


def test_normal_end_is_no_stall() -> None:
    detector = StallDetector(10)
    assert detector.update(snapshot(0, in_flight=4)) is None
    for at in range(1, 100):
        assert detector.update(snapshot(at, {TRAIN: frozenset()}, orchestrator=False, in_flight=4)) is None, (
            "the orchestrator ended first"
        )
    detector.update(snapshot(200))
    for at in range(201, 300):
        assert detector.update(snapshot(at, {EVAL: BOTH[EVAL]})) is None, "the train server ended with its workers"


def test_no_returned_trial_for_max_time_is_a_stall() -> None:
    detector = StallDetector(600)
    assert detector.update(snapshot(0, in_flight=8)) is None
    assert detector.update(snapshot(599, in_flight=8)) is None
    assert detector.update(snapshot(600, in_flight=8, returned=1)) is None, "one trial returned"
    assert detector.update(snapshot(1200, in_flight=8, returned=1)) is None
    stall = detector.update(snapshot(1201, in_flight=8, returned=1))
    assert stall is not None and "waits for 8" in stall.what and "10 min" in stall.what


def test_slow_trainer_is_no_stall() -> None:
    detector = StallDetector(600)
    detector.update(snapshot(0, in_flight=8))
    for at in range(100, 10_000, 100):
        assert detector.update(snapshot(at, in_flight=0)) is None, "no trial is in flight"
    assert detector.update(snapshot(10_000, in_flight=8)) is None, "the time limit starts now"


def test_without_time_limit_only_workers_are_watched() -> None:
    detector = StallDetector(None)
    assert all(detector.update(snapshot(at, in_flight=8)) is None for at in range(0, 100_000, 1000))


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
FORKING_WORKER = """def work():
    while True:
        if os.fork() == 0:
            time.sleep(0.3 if os.fork() == 0 else 0.1)
            os._exit(0)
        os.wait()
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


def wait_for_orchestrator(monitor: ProcessMonitor) -> Snapshot:
    """Return the first snapshot with the orchestrator. Right after its start, /proc does not show its environment."""
    deadline = time.monotonic() + 60
    while not (current := monitor.snapshot()).orchestrator:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return current


def test_identifies_processes_by_logs(run_dir: Path) -> None:
    monitor = ProcessMonitor(f"test-{run_dir.name}", run_dir, None)
    assert monitor.snapshot().workers == {} and not monitor.snapshot().orchestrator
    processes = [
        start(run_dir, "envs/train/a.log", str(run_dir / "server.py")),
        start(run_dir, "orchestrator.log", "-c", "import time; time.sleep(300)"),
    ]
    try:
        deadline = time.monotonic() + 60
        while len(monitor.snapshot().workers.get(TRAIN, ())) < 2:
            assert time.monotonic() < deadline
            time.sleep(0.1)
        workers = monitor.snapshot().workers[TRAIN]
        assert monitor.snapshot().orchestrator and processes[0].pid not in workers
        killed = min(workers)
        os.kill(killed, signal.SIGKILL)
        while killed in monitor.snapshot().workers[TRAIN]:
            assert time.monotonic() < deadline
        assert monitor.snapshot().workers[TRAIN] == workers - {killed}
        assert exit_status(killed) == "killed by signal 9"
    finally:
        for pid in monitor.snapshot().workers.get(TRAIN, ()):
            os.kill(pid, signal.SIGKILL)
        for process in processes:
            process.kill()
            process.wait()


def test_forked_children_of_workers_are_not_watched(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stall_detector, "WORKER_MISSING_TIMEOUT_S", 0.5)
    (run_dir / "server.py").write_text(SERVER.replace("def work():\n    time.sleep(300)\n", FORKING_WORKER))
    run = f"test-{run_dir.name}"
    monitor, seen, stall = ProcessMonitor(run, run_dir, None), set(), None
    processes = [
        start(run_dir, "envs/train/a.log", str(run_dir / "server.py")),
        start(run_dir, "orchestrator.log", "-c", "import time; time.sleep(300)"),
    ]
    try:
        deadline = time.monotonic() + 60
        while len(workers := monitor.snapshot().workers.get(TRAIN, ())) < 2 or len(seen) < 8:
            seen |= {one.pid for one in processes_of(run) if SPAWNED in " ".join(cmdline(one))} - set(workers)
            assert monitor.check() is None
            assert time.monotonic() < deadline, f"{len(workers)} workers, {len(seen)} forked children"
        os.kill(killed := min(workers), signal.SIGKILL)
        while stall is None:
            stall = monitor.check()
            assert time.monotonic() < deadline
        assert stall.pid == killed
    finally:
        for process in processes:
            process.kill()
            process.wait()
        end_processes(run, grace_s=1)


def cmdline(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def test_sealed_file_is_no_returned_trial(run_dir: Path) -> None:
    old, new = (run_dir / f"rollouts/step_{step}/train/all/traces.jsonl" for step in (1, 2))
    for path in (old, new):
        path.parent.mkdir(parents=True)
        path.write_text("{}\n")
    monitor = ProcessMonitor(f"test-{run_dir.name}", run_dir, None)
    before = monitor.snapshot().returned
    old.unlink()
    assert monitor.snapshot().returned == before
    new.write_text("{}\n{}\n")
    assert monitor.snapshot().returned != before


STREAM = "monitors/file/traces/stream"
LAYOUTS = ["rollouts/step_1/train/all/traces.jsonl", f"{STREAM}.index.jsonl", f"{STREAM}/00000.jsonl"]


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        ("12:00 INFO Train batch 3/8 (2%); 9 inflight episodes (train=7, eval=2)", "Train batch 3/8 (2%); 9 inflight"),
        ("12:00 INFO Step 4 | 9 inflight episodes (train=7, eval=2 | a=7, b=2) | queue 3", "9 inflight"),
        ("12:00 INFO heldout 3/20; 9 inflight episodes (cap 16, signal 0.5)", None),
    ],
)
def test_status_line(line: str, shown: str | None) -> None:
    found = IN_FLIGHT.search(line)
    assert (found and found[0].partition(" episodes")[0], found and found["count"]) == (shown, shown and "9")


@pytest.mark.parametrize("episodes", LAYOUTS)
def test_reads_in_flight_and_returned_from_orchestrator_output(run_dir: Path, episodes: str) -> None:
    line = "\x1b[32m12:00\x1b[0m INFO Train batch {}/8 (+2 buffered); {} inflight episodes (train={}, eval=0)\n"
    log = run_dir / "logs/attempt_1/orchestrator.log"
    log.write_text(line.format(3, 9, 9))
    process = start(run_dir, "orchestrator.log", "-c", "import time; time.sleep(300)")
    try:
        monitor = ProcessMonitor(f"test-{run_dir.name}", run_dir, None)
        first = wait_for_orchestrator(monitor)
        assert first.in_flight == 9
        traces = run_dir / episodes
        traces.parent.mkdir(parents=True)
        traces.write_text("{}\n")
        second = monitor.snapshot()
        assert second.returned != first.returned
        assert monitor.snapshot().returned == second.returned
        with log.open("a") as more:
            more.write(line.format(4, 5, 5) + "INFO something else\n")
        assert monitor.snapshot().in_flight == 5 and monitor.snapshot().returned != second.returned
    finally:
        process.kill()
        process.wait()


def test_provider_given_up_ends_the_run_and_not_its_successor(run_dir: Path) -> None:
    state = run_dir / "trials" / STARTS / "modal.json"
    state.parent.mkdir(parents=True)
    failed = StartState(given_up=True, failing_since=0.0, ended=1830.0, fault="ConnectionError: no capacity")
    state.write_text(failed.model_dump_json())
    monitor = ProcessMonitor(f"test-{run_dir.name}", run_dir, None, [run_dir / "trials"])
    assert monitor.check() is None, "an earlier run's"
    state.write_text(failed.model_dump_json())
    found = monitor.check()
    assert found is not None
    text = stall_report(found, run_dir / "rl.log", resumable=True)
    assert "no sandbox of modal started for 30 min, the last failed with ConnectionError: no capacity" in text
    assert text.endswith("quota; continue from the last checkpoint with --resume, or use --restarts N")
