"""One run's life: started, stopped with Ctrl-C, resumed, killed, resumed, finished.

The run is a random model on two tasks whose verifier throws a coin (see `mini_run`); trials, sandbox, sampler, learner
and environment server are the real ones. The life is lived once; each test looks at one side of it.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import mini_run
import psutil
import pytest

from harbortrainer.cli import main as command_line

pytestmark = pytest.mark.e2e
PATIENCE_S = 240
STEPS = 3


def start(config: Path, *arguments: str) -> subprocess.Popen[str]:
    """The command line in a process of its own."""
    here = Path(__file__).parent
    variables = {"PYTHONPATH": f"{here.parent}:{here}", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    return subprocess.Popen(
        [sys.executable, str(here / "mini_run.py"), str(config), *arguments],
        env={**os.environ, **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def wait_for(condition: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    """Until the condition holds; fails when the process ends before it does."""
    end = time.monotonic() + PATIENCE_S
    while not condition():
        if process.poll() is not None:
            pytest.fail(f"ended with {process.returncode}: {process.communicate()[0][-2000:]}")
        if time.monotonic() > end:
            process.kill()
            pytest.fail(f"took too long: {process.communicate()[0][-2000:]}")
        time.sleep(0.05)


def lines(path: Path) -> list[dict]:
    """The complete lines of a file."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]


@dataclass
class Life:
    """What the life of the run left to look at."""

    folder: Path
    config: Path
    interrupted: dict = field(default_factory=dict)
    stop_s: float = 0.0
    stop_code: int | None = None
    left: list[str] = field(default_factory=list)
    before_kill: list[dict] = field(default_factory=list)
    after_kill: list[str] = field(default_factory=list)
    output: str = ""
    code: int | None = None

    @property
    def run(self) -> Path:
        return self.folder / "outputs" / "mini"

    def finished(self, step: int) -> Callable[[], bool]:
        """Whether a step is finished, as a condition."""
        return lambda: (self.run / "checkpoints" / f"step_{step}" / "progress.json").exists()


def family(process: subprocess.Popen[str]) -> list[psutil.Process]:
    """A process and everything it started."""
    root = psutil.Process(process.pid)
    return [root, *root.children(recursive=True)]


def survivors(processes: list[psutil.Process], within: float = 15.0) -> list[str]:
    """Those that are still there after a while, in words."""
    _, alive = psutil.wait_procs(processes, timeout=within)
    return [" ".join(process.cmdline()) for process in alive if process.is_running()]


def press_ctrl_c(life: Life) -> None:
    process = start(life.config)
    wait_for(life.finished(1), process)
    running = family(process)
    pressed = time.monotonic()
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    life.stop_s, life.stop_code = time.monotonic() - pressed, process.returncode
    life.left = survivors(running)
    life.interrupted = json.loads((life.run / "summary.json").read_text())


def kill_it(life: Life) -> None:
    process = start(life.config, "--resume")
    wait_for(life.finished(life.interrupted["steps"] + 1), process)
    running = family(process)
    process.kill()
    process.communicate(timeout=60)
    life.after_kill = survivors(running)
    life.before_kill = lines(life.run / "metrics.jsonl")


@pytest.fixture(scope="module")
def life(tmp_path_factory: pytest.TempPathFactory) -> Life:
    folder = tmp_path_factory.mktemp("mini")
    it = Life(folder, mini_run.write_run(folder, steps=STEPS, keep="all"))
    press_ctrl_c(it)
    kill_it(it)
    process = start(it.config, "--resume")
    it.output = process.communicate(timeout=PATIENCE_S)[0]
    it.code = process.returncode
    return it


def steps(rows: list[dict]) -> list[int]:
    return [row["step"] for row in rows if "loss" in row]


def test_ctrl_c_stops_within_ten_seconds_and_says_where(life):
    assert life.stop_code == 130
    assert life.stop_s < 10
    assert life.interrupted["status"] == "interrupted"
    assert life.interrupted["steps"] >= 1


def test_ctrl_c_leaves_no_process(life):
    assert life.left == []


def test_a_kill_leaves_no_process(life):
    assert life.after_kill == []


def test_a_resume_goes_on_from_the_last_finished_step_and_finishes(life):
    assert life.code == 0, life.output
    assert re.search(r"going on after step \d", life.output)
    assert json.loads((life.run / "summary.json").read_text())["steps"] == STEPS


def test_every_step_is_written_once(life):
    rows = lines(life.run / "metrics.jsonl")
    assert steps(rows) == list(range(1, STEPS + 1))
    assert [row["step"] for row in rows if "eval/n" in row] == list(range(STEPS + 1))


def test_a_kill_loses_nothing_that_was_finished(life):
    done = life.interrupted["steps"] + 1
    before = [row for row in life.before_kill if row["step"] <= done and "loss" in row]
    after = lines(life.run / "metrics.jsonl")
    assert len(before) == done
    assert all(row in after for row in before)


def test_every_trained_token_was_sampled_with_its_log_probability(life):
    for row in lines(life.run / "metrics.jsonl"):
        if "loss" in row:
            assert row["tokens/trained"] > 0
            assert row["proof/logprob_diff/max"] < 1e-3


def test_each_trial_is_listed_with_its_outcome_and_reward(life):
    for step in range(1, STEPS + 1):
        rows = lines(life.run / "rollouts" / f"step_{step}.jsonl")
        assert len(rows) >= 8
        assert {row["reward"] for row in rows} <= {0.0, 1.0}
        assert {row["outcome"] for row in rows} <= {"completed", "turn_limit", "output_limit"}


def test_the_summary_counts_what_is_listed(life):
    summary = json.loads((life.run / "summary.json").read_text())
    listed = sum(len(lines(path)) for path in (life.run / "rollouts").iterdir())
    assert summary["trials"] == listed == sum(summary["outcomes"].values())
    assert summary["engine"] == "local"
    assert summary["status"] == "finished"
    assert summary["eval"]["before"]["n"] == summary["eval"]["after"]["n"] == 2
    assert 0 < summary["peak_rss_mb"] < 4000


def test_the_curve_is_drawn_at_the_end(life):
    assert "mean reward by step" in life.output
    assert (life.run / "reward.png").stat().st_size > 1000


def test_the_last_adapter_loads_in_plain_peft(life):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(life.folder / "model")
    model = PeftModel.from_pretrained(base, str(life.run / "checkpoints" / f"step_{STEPS}"))
    assert any(parameter.abs().sum() > 0 for name, parameter in model.named_parameters() if "lora_B" in name)


def test_a_finished_run_resumes_to_its_summary_at_once(life, capsys):
    started = time.monotonic()
    assert command_line(["train", "--engine", "local", "--config", str(life.config), "--resume"]) == 0
    assert f"{STEPS} steps" in capsys.readouterr().out
    assert time.monotonic() - started < 30


def test_a_resume_of_another_run_is_refused_and_changes_nothing(life, capsys):
    before = (life.run / "config.toml").read_text()
    other = life.folder / "other.toml"
    other.write_text(life.config.read_text().replace("lr = 1e-3", "lr = 2e-3"))
    assert command_line(["train", "--engine", "local", "--config", str(other), "--resume"]) == 2
    assert "this folder belongs to another run: trainer.optim.lr was 0.001" in capsys.readouterr().err
    assert (life.run / "config.toml").read_text() == before


def test_a_sandbox_that_cannot_start_stops_the_run_before_anything_trains(tmp_path):
    config = mini_run.write_run(tmp_path, environment="e2e_environments:WillNotStart")
    process = start(config)
    output = process.communicate(timeout=PATIENCE_S)[0]
    assert process.returncode == 1, output
    assert "sandbox_error" in output
    assert not list((tmp_path / "outputs" / "mini" / "checkpoints").iterdir())
