"""One training run that is stopped with Ctrl-C, resumed, killed, resumed again and finished.

The run trains a random model on two tasks with random rewards (see `mini_run`). Trials, sandbox, sampler, learner and
environment server are real. A module fixture executes the run once; each test checks one aspect of its results.
"""

import gzip
import json
import math
import re
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import mini_run
import psutil
import pytest
from leftovers import remaining_processes
from metrics_table import documented_metrics, matches
from patience import HANG_S
from starlette.testclient import TestClient

from harbortrainer.cli import main as command_line
from harbortrainer.environment.request_check import RUN_KEY_FILE, RunKey
from harbortrainer.runs.live_status import LIVE_FILE, LiveStatus
from harbortrainer.runs.transcript_files import read_transcript, transcript_place
from harbortrainer.runs.trial_row import read_rows
from harbortrainer.trials.outcome import Outcome
from harbortrainer.view.run_folders import open_store
from harbortrainer.view.server import Site

pytestmark = pytest.mark.e2e
PATIENCE_S = 600
STEPS = 3


def start(config: Path, *arguments: str) -> subprocess.Popen[str]:
    """Start the command in its own process."""
    return subprocess.Popen(
        [sys.executable, mini_run.__file__, str(config), *arguments],
        env=mini_run.ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def wait_for(condition: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    """Wait until the condition holds; fail if the process ends first."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        if process.poll() is not None:
            pytest.fail(f"ended with {process.returncode}: {process.communicate()[0][-2000:]}")
        if time.monotonic() > deadline:
            process.kill()
            pytest.fail(f"took too long: {process.communicate()[0][-2000:]}")
        time.sleep(0.05)


def lines(path: Path) -> list[dict]:
    """Return the complete JSON lines of a file."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]


@dataclass
class FinishedRun:
    """The finished run, with what was recorded at each interruption."""

    folder: Path
    config: Path
    phases: set[str] = field(default_factory=set)
    """Phases that `live.json` named before the first step was finished."""
    in_flight: set[str] = field(default_factory=set)
    """Tasks that it named as in flight."""
    interrupted: dict = field(default_factory=dict)
    """The summary after Ctrl-C."""
    stop_s: float = 0.0
    stop_code: int | None = None
    after_stop: list[str] = field(default_factory=list)
    """Processes that remained after Ctrl-C."""
    metrics_at_kill: list[dict] = field(default_factory=list)
    after_kill: list[str] = field(default_factory=list)
    """Processes that remained after the kill."""
    output: str = ""
    code: int | None = None
    seconds: list[float] = field(default_factory=list)
    """Wall time of each start, measured by the test."""

    @property
    def run_dir(self) -> Path:
        return self.folder / "outputs" / "mini"

    def finished(self, step: int) -> Callable[[], bool]:
        """Return a condition: whether a step is finished."""
        return lambda: (self.run_dir / "checkpoints" / f"step_{step}" / "progress.json").exists()


def process_tree(process: subprocess.Popen[str]) -> list[psutil.Process]:
    """Return a process and all its descendants."""
    root = psutil.Process(process.pid)
    return [root, *root.children(recursive=True)]


@contextmanager
def timed(trained: FinishedRun) -> Generator[None]:
    started = time.monotonic()
    yield
    trained.seconds.append(time.monotonic() - started)


def stop_with_ctrl_c(trained: FinishedRun) -> None:
    process = start(trained.config)

    def first_step_finished() -> bool:
        status = LiveStatus.read(trained.run_dir)
        trained.phases |= {phase.text for phase in status.phases}
        trained.in_flight |= {trial.task for trial in status.trials}
        return trained.finished(1)()

    wait_for(first_step_finished, process)
    running = process_tree(process)
    pressed = time.monotonic()
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    trained.stop_s, trained.stop_code = time.monotonic() - pressed, process.returncode
    trained.after_stop = remaining_processes(running)
    trained.interrupted = json.loads((trained.run_dir / "summary.json").read_text())


def resume_and_kill(trained: FinishedRun) -> None:
    process = start(trained.config, "--resume")
    wait_for(trained.finished(trained.interrupted["steps"] + 1), process)
    running = process_tree(process)
    process.kill()
    process.communicate(timeout=60)
    trained.after_kill = remaining_processes(running)
    trained.metrics_at_kill = lines(trained.run_dir / "metrics.jsonl")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> FinishedRun:
    folder = tmp_path_factory.mktemp("mini")
    # Every checkpoint is kept; the tests compare their wall times.
    run = FinishedRun(folder, mini_run.write_run(folder, steps=STEPS, keep="all", tail="[ckpt]\ninterval = 1\n"))
    run.config.write_text(run.config.read_text().replace('[orchestrator.renderer]\nname = "default"\n', ""))
    with timed(run):
        stop_with_ctrl_c(run)
    with timed(run):
        resume_and_kill(run)
    with timed(run):
        process = start(run.config, "--resume")
        run.output = process.communicate(timeout=PATIENCE_S)[0]
    run.code = process.returncode
    return run


def trained_steps(rows: list[dict]) -> list[int]:
    """Return the steps of the rows that have a loss."""
    return [row["step"] for row in rows if "loss" in row]


def test_ctrl_c_stops_and_writes_summary(trained):
    assert trained.stop_code == 130
    assert trained.stop_s < HANG_S  # about ten seconds on an idle machine
    assert trained.interrupted["status"] == "interrupted"
    assert trained.interrupted["steps"] >= 1


def test_live_status_names_phases_and_trials_in_flight(trained):
    assert "steps" in trained.phases, "the other phases may be too short to see"
    assert trained.in_flight == {task.name for task in (trained.folder / "tasks").iterdir()}
    assert not (trained.run_dir / LIVE_FILE).exists()


def test_ctrl_c_leaves_no_process(trained):
    assert trained.after_stop == []


def test_kill_leaves_no_process(trained):
    assert trained.after_kill == []


def test_resume_continues_after_last_finished_step(trained):
    assert trained.code == 0, trained.output
    assert re.search(r"continuing after step \d", trained.output)
    assert re.search(r"^loading torch, transformers and peft: \d+\.\d s$", trained.output, re.MULTILINE)
    assert f"  harbortrainer export {trained.run_dir}" in trained.output
    assert json.loads((trained.run_dir / "summary.json").read_text())["steps"] == STEPS


def test_metrics_have_each_step_once(trained):
    rows = lines(trained.run_dir / "metrics.jsonl")
    assert trained_steps(rows) == list(range(1, STEPS + 1))
    assert [row["step"] for row in rows if "eval/n" in row] == list(range(STEPS + 1))


def test_kill_keeps_finished_steps(trained):
    done = trained.interrupted["steps"] + 1
    before = [row for row in trained.metrics_at_kill if row["step"] <= done and "loss" in row]
    after = lines(trained.run_dir / "metrics.jsonl")
    assert len(before) == done
    assert all(row in after for row in before)


def test_run_key_is_in_its_file_only(trained):
    file = trained.run_dir / "log" / RUN_KEY_FILE
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    key = RunKey(json.loads(file.read_text())["key"])
    secrets = [text.encode() for text in (key.secret, key.sampler_key)]
    others = [path for path in trained.run_dir.rglob("*") if path.is_file() and path != file]
    contents = [gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes() for path in others]
    assert len(others) > 20
    assert not [path for path, content in zip(others, contents, strict=True) if any(s in content for s in secrets)]
    assert key.secret not in trained.output and key.sampler_key not in trained.output


def test_trained_logprobs_equal_sampled_logprobs(trained):
    for row in lines(trained.run_dir / "metrics.jsonl"):
        if "loss" in row:
            assert row["tokens/trained"] > 0
            assert row["proof/logprob_diff/max"] < 1e-3


def test_rollouts_list_outcome_and_reward_of_each_trial(trained):
    for step in range(1, STEPS + 1):
        rows = lines(trained.run_dir / "rollouts" / f"step_{step}.jsonl")
        assert len(rows) >= 8
        assert {row["reward"] for row in rows} <= {0.0, 1.0}
        assert {row["outcome"] for row in rows} <= {"completed", "turn_limit", "output_limit"}


def test_each_trial_has_one_transcript_with_all_tokens(trained):
    names = [f"{kind}step_{step}" for step in range(STEPS + 1) for kind in ("", "eval_")][1:]
    found = [(name, row) for name in names for row in read_rows(trained.run_dir / f"rollouts/{name}.jsonl")]
    started = [(name, row) for name, row in found if row.outcome != "cancelled"]
    transcripts = {(name, row.transcript) for name, row in started}
    assert len({row.trial for _, row in started}) == len(started) == len(transcripts)
    for name, row in started:
        assert row.transcript is not None
        transcript = read_transcript(trained.run_dir, transcript_place(name, row.transcript), row.trial)
        assert transcript is not None
        turns = transcript.turns()
        assert (len(turns), sum(len(turn.token_ids) for turn in turns)) == (row.turns, row.tokens.output)
        assert all(len(turn.logprobs) == len(turn.token_ids) and max(turn.logprobs) <= 0 for turn in turns)
        assert min(turn.version or 0 for turn in turns) == row.version
        assert "Look around" in turns[0].shown[0].text
    packed = [gzip.decompress((trained.run_dir / f"transcripts/{name}.jsonl.gz").read_bytes()) for name in names]
    assert sum(text.count(b"\n") for text in packed) == len(started), "a transcript belongs to no row"
    pending = list((trained.run_dir / "transcripts").glob("pending*"))
    assert not pending, "a transcript is unfinished after the last step"


def test_pages_show_each_trial_with_all_sampled_tokens(trained):
    pages = TestClient(Site(open_store(trained.run_dir)).app(), base_url="http://localhost")
    rows = [row for path in trained.run_dir.glob("rollouts/*.jsonl") for row in lines(path)]
    assert f"{len(rows)} trials" in pages.get("/trials").text
    for row in rows:
        page = pages.get(f"/trial/{row['trial']}").text
        assert page.count('<span class="t ') == row["tokens"]["output"] and row["outcome"] in page
        assert ("Trained on: " in page) == (row["kind"] == "train" and row["not_trained"] is None)


def test_harbor_viewer_shows_run_as_job_with_mean_reward(trained):
    from harbor.models.job.result import JobResult
    from harbor.viewer.server import create_app

    # Harbor's viewer shows 0 trials if the result is invalid.
    JobResult.model_validate_json((trained.run_dir / "result.json").read_bytes())
    viewer = TestClient(create_app(trained.run_dir.parent))
    (job,) = viewer.get("/api/jobs").json()["items"]
    rows = [row for path in (trained.run_dir / "rollouts").glob("*.jsonl") for row in lines(path)]
    trials = sorted(row["trial"] for row in rows if row["outcome"] != "cancelled")
    assert (job["name"], job["n_total_trials"], job["n_completed_trials"]) == ("mini", len(rows), len(trials)), (
        trained.output
    )
    rewards = [row["reward"] for row in rows if row["kind"] == "train" and row["reward"] is not None]
    (evaluation,) = job["evals"].values()
    assert evaluation["metrics"][0]["mean"] == pytest.approx(sum(rewards) / len(rewards))
    shown = viewer.get("/api/jobs/mini/trials", params={"page_size": 100}).json()["items"]
    assert sorted(trial["name"] for trial in shown) == trials
    for part in ("", "/trajectory", "/verifier-output", "/files"):
        assert viewer.get(f"/api/jobs/mini/trials/{trials[0]}{part}").status_code == 200


def test_docs_list_exactly_the_written_metrics(trained):
    written = {name for row in lines(trained.run_dir / "metrics.jsonl") for name in row} - {"step"}
    table = documented_metrics("both", "embedded", "trainer")
    assert [name for name in table if not any(matches(name, key) for key in written)] == []
    assert [key for key in written if not any(matches(name, key) for name in table)] == []


def test_outcome_shares_sum_to_one(trained):
    key = "train/agg/all/agent/metrics/outcome_{}/mean"
    for row in lines(trained.run_dir / "metrics.jsonl"):
        if "loss" in row:
            assert math.isclose(sum(row[key.format(outcome)] for outcome in Outcome), 1.0)


def test_summary_counts_equal_rollout_rows(trained):
    summary = json.loads((trained.run_dir / "summary.json").read_text())
    listed = sum(len(lines(path)) for path in (trained.run_dir / "rollouts").iterdir())
    assert summary["trials"] == listed == sum(summary["outcomes"].values())
    assert summary["engine"] == "local"
    assert summary["status"] == "finished"
    assert summary["eval"]["before"]["n"] == summary["eval"]["after"]["n"] == 2
    assert 0 < summary["peak_rss_mb"] < 4000


def wall_s(trained: FinishedRun, step: int) -> float:
    """Return the wall time of the run up to a step, from its checkpoint."""
    return json.loads((trained.run_dir / "checkpoints" / f"step_{step}" / "progress.json").read_text())["wall_s"]


def test_wall_time_accumulates_over_resumes(trained):
    """Each start adds at least the time of its steps and at most its own wall time."""
    step_s = {row["step"]: row["time/step"] for row in lines(trained.run_dir / "metrics.jsonl") if "loss" in row}
    walls = {step: wall_s(trained, step) for step in step_s}
    for step in range(2, STEPS + 1):
        assert walls[step] >= walls[step - 1] + step_s[step]
    first, resumed = trained.interrupted["steps"], re.search(r"continuing after step (\d+)", trained.output)
    assert resumed is not None
    killed = int(resumed[1])
    stopped = trained.interrupted["wall_s"]
    assert sum(step_s[step] for step in range(1, first + 1)) <= walls[first] <= stopped <= trained.seconds[0]
    for step in range(first + 1, killed + 1):
        assert stopped + step_s[step] <= walls[step] <= stopped + trained.seconds[1]
    final = json.loads((trained.run_dir / "summary.json").read_text())["wall_s"]
    remaining = sum(step_s[step] for step in range(killed + 1, STEPS + 1))
    assert walls[killed] + remaining <= final <= walls[killed] + trained.seconds[2]


def test_reward_curve_is_drawn_at_the_end(trained):
    assert "mean reward by step" in trained.output
    assert (trained.run_dir / "reward.png").stat().st_size > 1000


def test_last_adapter_loads_with_peft(trained):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(trained.folder / "model")
    model = PeftModel.from_pretrained(base, str(trained.run_dir / "checkpoints" / f"step_{STEPS}"))
    assert any(parameter.abs().sum() > 0 for name, parameter in model.named_parameters() if "lora_B" in name)


def test_resume_of_finished_run_prints_summary(trained, capsys):
    before = json.loads((trained.run_dir / "summary.json").read_text())["wall_s"]
    started = time.monotonic()
    assert command_line(["train", "--engine", "local", "--config", str(trained.config), "--resume"]) == 0
    assert f"{STEPS} steps" in capsys.readouterr().out
    took = time.monotonic() - started
    assert took < 120
    assert before <= json.loads((trained.run_dir / "summary.json").read_text())["wall_s"] <= before + took


def test_resume_with_changed_config_is_refused(trained, capsys):
    before = (trained.run_dir / "config.toml").read_text()
    other = trained.folder / "other.toml"
    other.write_text(trained.config.read_text().replace("lr = 1e-3", "lr = 2e-3"))
    assert command_line(["train", "--engine", "local", "--config", str(other), "--resume"]) == 2
    assert "this folder belongs to another run: trainer.optim.lr was 0.001" in capsys.readouterr().err
    assert (trained.run_dir / "config.toml").read_text() == before


@pytest.mark.long
def test_unstartable_sandbox_stops_run_before_training(tmp_path):
    config = mini_run.write_run(tmp_path, environment="e2e_environments:WillNotStart")
    process = start(config)
    output = process.communicate(timeout=PATIENCE_S)[0]
    assert process.returncode == 1, output
    assert "sandbox_error" in output
    assert not list((tmp_path / "outputs" / "mini" / "checkpoints").iterdir())
