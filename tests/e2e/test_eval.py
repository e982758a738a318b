"""`harbortrainer eval` from its command line: killed, resumed, its server gone, opened by Harbor's own viewer.

The trials, the sandboxes, the environment server and the endpoint are real; what the model says is written down.
"""

import json
import os
import subprocess
import sys
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
from harbortrainer.evaluation.trial_row import TrialRow
from harbortrainer.runs.transcript_files import read
from harbortrainer.runs.trial_line import TrialLine

pytestmark = pytest.mark.e2e
PATIENCE_S = 900
SOLVES = by_turn([keys("mkdir -p /app && touch /app/answer"), DONE, DONE])
NEVER = "echo nothing found; echo 0 > /logs/verifier/reward.txt"
TAGGED = '[metadata]\ntags = ["easy"]'


def write_tasks(folder: Path) -> Path:
    """One that is solved, one that never is, and one whose sandbox cannot be built."""
    make_task(folder / "solved", test=SOLVED, agent_timeout_s=200, verifier_timeout_s=100, extra=TAGGED)
    make_task(folder / "unsolved", test=NEVER, agent_timeout_s=200, verifier_timeout_s=100)
    make_task(folder / "broken", dockerfile="FROM debian:12-slim\nRUN false\n")
    return folder


@dataclass
class Lived:
    """An evaluation that was killed and resumed, with what stood in its folder at the kill."""

    folder: Path
    tasks: Path
    before: str
    said: str
    rates: Path


@pytest.fixture(scope="module")
def lived(tmp_path_factory: pytest.TempPathFactory, tokenizer_dir: Path) -> Generator[Lived]:
    """Kill the process when two trials are in; go on; wait for the end."""
    top = tmp_path_factory.mktemp("eval")
    tasks, out, rates = write_tasks(top / "tasks"), top / "jobs" / "first", top / "rates.json"
    with ScriptedEngine(tokenizer_dir, SOLVES) as engine:
        words = [str(tasks), "--base-url", f"{engine.url}/v1", "--model", "scripted", "-k", "3", "--parallel", "2"]
        words += ["--out", str(out), "--price-in", "1", "--price-out", "2", "--difficulty", str(rates)]
        process = start(*words)
        wait_for(lambda: len(lines(out)) >= 2, process)
        family = [process, *psutil.Process(process.pid).children(recursive=True)]
        process.kill()
        process.wait()
        before = (out / ROWS).read_text()
        # The environment server sees that we are gone, and takes its sandboxes down.
        gone = psutil.wait_procs([p for p in family if isinstance(p, psutil.Process)], timeout=PATIENCE_S)
        assert not gone[1]
        again = start(*words, "--resume")
        said = again.communicate(timeout=2 * PATIENCE_S)[0]
        assert again.returncode == 0, said
    yield Lived(out, tasks, before, said, rates)


def start(*words: str) -> subprocess.Popen[str]:
    """The command in a process of its own."""
    return subprocess.Popen(
        [sys.executable, "-c", "import sys; from harbortrainer.cli import main; sys.exit(main())", "eval", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ,
    )


def lines(folder: Path) -> list[str]:
    """The complete lines of an evaluation's trials."""
    file = folder / ROWS
    return [line for line in file.read_text().splitlines(keepends=True) if line.endswith("\n")] if file.exists() else []


def wait_for(condition, process: subprocess.Popen[str]) -> None:
    """Until the condition holds; fails when the process ends before it does."""
    end = time.monotonic() + PATIENCE_S
    while not condition():
        if process.poll() is not None or time.monotonic() > end:
            process.kill()
            pytest.fail(f"code {process.returncode}: {process.communicate()[0][-2000:]}")
        time.sleep(0.05)


def test_a_killed_evaluation_loses_nothing_that_was_measured(lived: Lived) -> None:
    after = (lived.folder / ROWS).read_text()
    whole = lived.before[: lived.before.rfind("\n") + 1]
    assert whole and after.startswith(whole)
    graded = [row for row in map(TrialRow.model_validate_json, after.splitlines()) if row.graded]
    attempts = [(row.task, row.attempt) for row in graded]
    assert sorted(attempts) == [(task, number) for task in ("solved", "unsolved") for number in range(3)]


def test_a_broken_sandbox_is_counted_apart_and_not_as_0(lived: Lived) -> None:
    report = json.loads((lived.folder / "report.json").read_text())
    assert report["lost"] == {"sandbox_error": 3}
    assert (report["mean"]["mean"], report["mean"]["tasks"], report["mean"]["attempts"]) == (0.5, 2, 6)
    assert report["outcomes"] == {"completed": 6, "sandbox_error": 3}
    passes = {found["name"]: found["estimate"]["mean"] for found in report["passes"]}
    assert passes == dict.fromkeys(("pass@1", "pass@2", "pass@3", "pass^1", "pass^2", "pass^3"), 0.5)
    assert report["by_tag"]["easy"]["mean"] == 1.0
    assert "3 lost and not counted (sandbox_error 3)" in lived.said


def test_tokens_and_cost_are_what_the_server_counted(lived: Lived) -> None:
    report = json.loads((lived.folder / "report.json").read_text())
    rows = EvalFolder.read(lived.folder).rows()
    prompt, sampled = (sum(getattr(row, name) for row in rows) for name in ("prompt_tokens", "sampled_tokens"))
    assert prompt > sampled > 0
    assert report["cost_usd"] == pytest.approx((prompt + 2 * sampled) / 1e6)


def test_each_trial_has_a_transcript_also_after_a_kill(lived: Lived) -> None:
    found = [TrialLine.of_attempt(json.loads(line), TRANSCRIPTS) for line in lines(lived.folder)]
    kept = [(line, read(lived.folder, line.place, line.trial)) for line in found if line.place]
    assert {line.task for line, _ in kept} >= {"solved", "unsolved"}
    for line, transcript in kept:
        assert transcript is not None, line
        turns = transcript.turns()
        assert len(turns) == line.turns and sum(turn.answer.sampled_len for turn in turns) == line.tokens.output
        if line.task == "unsolved":
            assert transcript.verifier_output == "nothing found"
        if line.task == "solved":
            assert "touch /app/answer" in turns[0].answer.text


def test_measured_rates_are_of_what_was_graded(lived: Lived) -> None:
    rates = json.loads(lived.rates.read_text())["tasks"]
    assert {rate["name"]: rate["pass_rate"] for rate in rates.values()} == {"solved": 1.0, "unsolved": 0.0}


def test_harbors_own_viewer_shows_it_as_a_job_with_our_mean(lived: Lived) -> None:
    from harbor.viewer.server import create_app

    viewer = TestClient(create_app(lived.folder.parent))
    (job,) = viewer.get("/api/jobs").json()["items"]
    assert (job["name"], job["n_total_trials"], job["n_completed_trials"]) == ("first", 9, 6)
    assert [own["metrics"] for own in job["evals"].values()] == [[{"mean": 0.5}]]
    trials = viewer.get("/api/jobs/first/trials").json()["items"]
    assert sorted(trial["reward"] for trial in trials) == [0.0] * 3 + [1.0] * 3
    assert all(viewer.get(f"/api/jobs/first/trials/{trial['name']}").status_code == 200 for trial in trials)
    tasks = viewer.get("/api/jobs/first/tasks").json()["items"]
    assert {task["task_name"].rpartition("/")[2]: task["avg_reward"] for task in tasks} == {
        "solved": 1.0,
        "unsolved": 0.0,
    }


def test_an_endpoint_that_goes_down_stops_it_in_one_line_and_nothing_is_lost(
    tmp_path: Path, tokenizer_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_task(tmp_path / "tasks" / "solved", agent_timeout_s=200, verifier_timeout_s=100)
    calls = [0]

    def dies(prompt: str) -> Answer:
        calls[0] += 1
        return SOLVES(prompt) if calls[0] <= 4 else Answer(status=400, message="the model was unloaded")

    with ScriptedEngine(tokenizer_dir, dies) as engine:
        out = tmp_path / "out"
        words = ["eval", str(tmp_path / "tasks"), "--base-url", f"{engine.url}/v1", "--model", "m", "-k", "8"]
        assert main([*words, "--parallel", "1", "--out", str(out)]) == 2
    said = capsys.readouterr().err
    assert "answers 400" in said and "1 graded trials are kept" in said and said.count("\n") == 1
    assert [row.reward for row in EvalFolder.read(out).rows() if row.graded] == [1.0]
    assert json.loads((out / "report.json").read_text())["missing"] > 0
