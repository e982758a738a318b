"""`harbortrainer eval` from the command line: kill, resume, server failure, Harbor's viewer.

Trials, sandboxes, environment server and endpoint are real; the model is scripted.
"""

import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from fakes import DONE, SOLVED, keys, make_task
from fastapi.testclient import TestClient
from scripted_engine import Answer, ScriptedEngine, by_turn

from harbortrainer.cli import main
from harbortrainer.evaluation.eval_folder import ROWS, TRANSCRIPTS, EvalFolder
from harbortrainer.runs.transcript import Place
from harbortrainer.runs.transcript_files import read_transcript
from harbortrainer.runs.trial_row import TrialRow

pytestmark = pytest.mark.e2e
PATIENCE_S = 900
SOLVES = by_turn([keys("mkdir -p /app && touch /app/answer"), DONE, DONE])
UNSOLVABLE = "echo nothing found; echo 0 > /logs/verifier/reward.txt"
TAGGED = '[metadata]\ntags = ["easy"]'


def write_tasks(folder: Path) -> Path:
    """Write three tasks: a solvable one, an unsolvable one, and one whose sandbox cannot be built."""
    make_task(folder / "solved", test=SOLVED, agent_timeout_s=200, verifier_timeout_s=100, extra=TAGGED)
    make_task(folder / "unsolved", test=UNSOLVABLE, agent_timeout_s=200, verifier_timeout_s=100)
    make_task(folder / "broken", dockerfile="FROM debian:12-slim\nRUN false\n")
    return folder


@dataclass
class ResumedEvaluation:
    """An evaluation that was killed and resumed, with its folder's contents at the kill."""

    folder: Path
    tasks: Path
    rows_at_kill: str
    output: str
    """Output of the resumed command."""
    rates: Path


@pytest.fixture(scope="module")
def evaluation(tmp_path_factory: pytest.TempPathFactory, tokenizer_dir: Path) -> Generator[ResumedEvaluation]:
    """Kill the process after two trials, resume it, and wait for its end."""
    top = tmp_path_factory.mktemp("eval")
    tasks, out, rates = write_tasks(top / "tasks"), top / "jobs" / "first", top / "rates.json"
    with ScriptedEngine(tokenizer_dir, SOLVES) as engine:
        arguments = [str(tasks), "--base-url", f"{engine.url}/v1", "--model", "scripted", "-k", "3", "--parallel", "2"]
        arguments += ["--out", str(out), "--price-in", "1", "--price-out", "2", "--difficulty", str(rates)]
        process = start(*arguments)
        wait_for(lambda: len(lines(out)) >= 2, process)
        processes = [process, *psutil.Process(process.pid).children(recursive=True)]
        process.kill()
        process.wait()
        rows_at_kill = (out / ROWS).read_text()
        # The environment server notices the kill and removes its sandboxes.
        descendants = [p for p in processes if isinstance(p, psutil.Process)]
        _, alive = psutil.wait_procs(descendants, timeout=PATIENCE_S)
        assert not alive
        resumed = start(*arguments, "--resume")
        output = resumed.communicate(timeout=2 * PATIENCE_S)[0]
        assert resumed.returncode == 0, output
    yield ResumedEvaluation(out, tasks, rows_at_kill, output, rates)


def start(*arguments: str) -> subprocess.Popen[str]:
    """Start the command in its own process."""
    return subprocess.Popen(
        [sys.executable, "-c", "import sys; from harbortrainer.cli import main; sys.exit(main())", "eval", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ,
    )


def lines(folder: Path) -> list[str]:
    """Return the complete rows of an evaluation's trials."""
    file = folder / ROWS
    return [line for line in file.read_text().splitlines(keepends=True) if line.endswith("\n")] if file.exists() else []


def wait_for(condition, process: subprocess.Popen[str]) -> None:
    """Wait until the condition holds; fail if the process ends first."""
    end = time.monotonic() + PATIENCE_S
    while not condition():
        if process.poll() is not None or time.monotonic() > end:
            process.kill()
            pytest.fail(f"code {process.returncode}: {process.communicate()[0][-2000:]}")
        time.sleep(0.05)


def test_killed_evaluation_keeps_finished_trials(evaluation: ResumedEvaluation) -> None:
    after = (evaluation.folder / ROWS).read_text()
    complete_rows = evaluation.rows_at_kill[: evaluation.rows_at_kill.rfind("\n") + 1]
    assert complete_rows and after.startswith(complete_rows)
    graded = [row for row in map(TrialRow.model_validate_json, after.splitlines()) if row.graded]
    attempts = [(row.task, row.attempt) for row in graded]
    assert sorted(attempts) == [(task, number) for task in ("solved", "unsolved") for number in range(3)]


def test_sandbox_failure_is_not_a_reward_of_0(evaluation: ResumedEvaluation) -> None:
    report = json.loads((evaluation.folder / "report.json").read_text())
    assert report["lost"] == {"sandbox_error": 3}
    assert (report["mean"]["mean"], report["mean"]["tasks"], report["mean"]["attempts"]) == (0.5, 2, 6)
    assert report["outcomes"] == {"completed": 6, "sandbox_error": 3}
    passes = {estimate["name"]: estimate["estimate"]["mean"] for estimate in report["passes"]}
    assert passes == dict.fromkeys(("pass@1", "pass@2", "pass@3", "pass^1", "pass^2", "pass^3"), 0.5)
    assert report["by_tag"]["easy"]["mean"] == 1.0
    assert "3 lost and not counted (sandbox_error 3)" in evaluation.output


def test_tokens_and_cost_equal_server_counts(evaluation: ResumedEvaluation) -> None:
    report = json.loads((evaluation.folder / "report.json").read_text())
    rows = EvalFolder.read(evaluation.folder).rows()
    prompt, sampled = (sum(getattr(row, name) for row in rows) for name in ("prompt_tokens", "sampled_tokens"))
    assert prompt > sampled > 0
    assert report["cost_usd"] == pytest.approx((prompt + 2 * sampled) / 1e6)


def test_every_trial_has_a_transcript_after_kill(evaluation: ResumedEvaluation) -> None:
    rows = [TrialRow.model_validate_json(line) for line in lines(evaluation.folder)]
    started = [(row, Place(TRANSCRIPTS, *row.transcript)) for row in rows if row.transcript]
    transcripts = [(row, read_transcript(evaluation.folder, place, row.trial)) for row, place in started]
    assert {row.task for row, _ in transcripts} >= {"solved", "unsolved"}
    for row, transcript in transcripts:
        assert transcript is not None, row
        turns = transcript.turns()
        assert len(turns) == row.turns and sum(turn.answer.sampled_len for turn in turns) == row.output_tokens
        if row.task == "unsolved":
            assert transcript.verifier_output == "nothing found"
        if row.task == "solved":
            assert "touch /app/answer" in turns[0].answer.text


def test_measured_rates_cover_graded_trials(evaluation: ResumedEvaluation) -> None:
    rates = json.loads(evaluation.rates.read_text())["tasks"]
    assert {rate["name"]: rate["pass_rate"] for rate in rates.values()} == {"solved": 1.0, "unsolved": 0.0}


def test_harbor_viewer_shows_evaluation_as_job(evaluation: ResumedEvaluation) -> None:
    from harbor.viewer.server import create_app

    viewer = TestClient(create_app(evaluation.folder.parent))
    (job,) = viewer.get("/api/jobs").json()["items"]
    assert (job["name"], job["n_total_trials"], job["n_completed_trials"]) == ("first", 9, 6)
    assert [source["metrics"] for source in job["evals"].values()] == [[{"mean": 0.5}]]
    trials = viewer.get("/api/jobs/first/trials").json()["items"]
    assert sorted(trial["reward"] for trial in trials) == [0.0] * 3 + [1.0] * 3
    assert all(viewer.get(f"/api/jobs/first/trials/{trial['name']}").status_code == 200 for trial in trials)
    tasks = viewer.get("/api/jobs/first/tasks").json()["items"]
    assert {task["task_name"].rpartition("/")[2]: task["avg_reward"] for task in tasks} == {
        "solved": 1.0,
        "unsolved": 0.0,
    }


def test_trials_of_a_killed_server_are_played_again(tmp_path: Path, tokenizer_dir: Path) -> None:
    make_task(tmp_path / "tasks" / "solved", agent_timeout_s=200, verifier_timeout_s=100)
    waiting = threading.Event()

    def answers(prompt: str) -> Answer:
        if not waiting.is_set():
            waiting.set()
            return Answer(DONE, delay_s=60)
        return SOLVES(prompt)

    with ScriptedEngine(tokenizer_dir, answers) as engine:
        arguments = [str(tmp_path / "tasks"), "--base-url", f"{engine.url}/v1", "--model", "m", "-k", "4"]
        process = start(*arguments, "--parallel", "2", "--out", str(tmp_path / "out"))
        wait_for(lambda: waiting.is_set() and len(lines(tmp_path / "out")) >= 1, process)
        server_of(process.pid).kill()
        output = process.communicate(timeout=PATIENCE_S)[0]
    assert process.returncode == 0, output
    assert "the environment server of 'eval' exited: killed by signal 9" in output
    assert "starting it again in 1 s" in output
    rows = [TrialRow.model_validate_json(line) for line in lines(tmp_path / "out")]
    assert sorted((row.attempt, row.reward, row.outcome) for row in rows) == [(n, 1.0, "completed") for n in range(4)]


def server_of(evaluation: int) -> psutil.Process:
    """Return the environment server of an evaluation, which runs the trials itself."""
    found = []
    for child in psutil.Process(evaluation).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):  # a command of a trial that has ended
            found += [child] if "harbortrainer.engines.env_server.env_main" in child.cmdline() else []
    (server,) = found
    return server


@pytest.mark.long
def test_endpoint_failure_stops_evaluation_without_loss(
    tmp_path: Path, tokenizer_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_task(tmp_path / "tasks" / "solved", agent_timeout_s=200, verifier_timeout_s=100)
    calls = [0]

    def fails_after_four_calls(prompt: str) -> Answer:
        calls[0] += 1
        return SOLVES(prompt) if calls[0] <= 4 else Answer(status=400, message="the model was unloaded")

    with ScriptedEngine(tokenizer_dir, fails_after_four_calls) as engine:
        out = tmp_path / "out"
        arguments = ["eval", str(tmp_path / "tasks"), "--base-url", f"{engine.url}/v1", "--model", "m", "-k", "8"]
        assert main([*arguments, "--parallel", "1", "--out", str(out)]) == 2
    stderr = capsys.readouterr().err
    assert "answers 400" in stderr and "1 graded trials are kept" in stderr and stderr.count("\n") == 1
    assert [row.reward for row in EvalFolder.read(out).rows() if row.graded] == [1.0]
    assert json.loads((out / "report.json").read_text())["missing"] > 0
