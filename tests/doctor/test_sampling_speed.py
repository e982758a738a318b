"""The doctor measures the embedded sampler and compares a trial's time with the agents' timeouts."""

from pathlib import Path

import pytest
from project_folder import write_project
from tiny_model import build_tiny_model

from harbortrainer.commands import diagnose
from harbortrainer.doctor import sampling_speed
from harbortrainer.doctor.finding import Level, green, red
from harbortrainer.engines.local import factories
from harbortrainer.errors import UserError

pytestmark = pytest.mark.torch

TRIALS, TURNS, ANSWER = 8, 3, 50


@pytest.fixture
def timed(plan, tmp_path: Path):
    """A function that returns the plan of a tiny model's run on a task with this agent timeout."""

    def make(timeout_s: float, **changes):
        task = tmp_path / f"tasks-{timeout_s}" / "one"
        (task / "tests").mkdir(parents=True)
        (task / "tests" / "test.sh").write_text("echo 1 > /logs/verifier/reward.txt\n")
        (task / "task.toml").write_text(f"[agent]\ntimeout_sec = {timeout_s}\n")
        (task / "instruction.md").write_text("do it")
        agent = {"max_turns": TURNS, "harness": {"environment_type": "local", "timeout_multiplier": 2.0}}
        env = {"taskset": {"id": "harbor_env", "tasks_dir": str(task.parent)}, "agent": agent}
        limits = {"concurrency": {"max_inflight": TRIALS}, "batch_size": 64, "group_size": 8}
        sampling = {"train": {"sampling": {"max_completion_tokens": ANSWER}}}
        model = build_tiny_model(tmp_path / "model")
        run = {"model": {"name": str(model)}, "orchestrator": limits | sampling, "seq_len": 1024}
        return plan(sources=[{"env": env}], **run | changes)

    return make


@pytest.mark.parametrize(("timeout_s", "short"), [(7.4, True), (7.6, False)])
def test_timeout_is_compared_with_a_trials_share_of_the_speed(timed, monkeypatch, timeout_s, short):
    """150 tokens at 80 / 8 tokens/s take 15 s; the timeout counts twice."""
    monkeypatch.setattr(sampling_speed, "tokens_per_second", lambda run, folder, requests: 80.0)
    pace, *warnings = sampling_speed.check(timed(timeout_s))
    assert pace.level is Level.GREEN and "80 tokens/s with 8 requests" in pace.what
    assert len(warnings) == short
    for warning in warnings:
        assert "150 tokens in 3 turns take about 15 s, but a task's agent has 15 s" in warning.what
        assert warning.level is Level.YELLOW and "raise timeout_multiplier to 2.1" in warning.do
        assert warning.where == "run.toml: orchestrator.train.source[0].env.agent.harness.timeout_multiplier"


def test_measurement_samples_one_batch_with_the_runs_sampler(timed, monkeypatch):
    samplers = []
    start, batch_seconds = factories.start_sampler, sampling_speed.batch_seconds

    def started(*args, **kwargs):
        samplers.append(start(*args, **kwargs))
        return samplers[0]

    async def counted(*args) -> float:
        assert await batch_seconds(*args) > 0
        assert samplers[0].stats()["sampled_tokens"] == TRIALS * sampling_speed.COMPLETION + before[0]
        return 2.0

    before = [0.0]
    monkeypatch.setattr(factories, "start_sampler", started)
    monkeypatch.setattr(sampling_speed, "batch_seconds", counted)
    found = list(sampling_speed.check(timed(60.0, inference={"vllm": {"dtype": "bfloat16"}})))
    assert f"{TRIALS * sampling_speed.COMPLETION / 2:.3g} tokens/s" in found[0].what
    assert str(samplers[0].model.dtype) == "torch.bfloat16"


@pytest.mark.parametrize("changes", [{"model": {"name": "me/absent-1B"}}, {"inference": {"engine": "vllm"}}])
def test_what_cannot_be_measured_is_reported(timed, changes):
    (finding,) = sampling_speed.check(timed(1.0, **changes))
    assert finding.level is Level.GREEN and finding.what.startswith("not measured")


@pytest.mark.parametrize("level", [Level.GREEN, Level.RED])
def test_flag_measures_a_run_without_red_findings(tmp_path, monkeypatch, capsys, level):
    monkeypatch.chdir(write_project(tmp_path))
    other = red("other", "wrong", "mend it") if level is Level.RED else green("other", "fine")
    monkeypatch.setattr(diagnose, "examine_machine", lambda plan: [other])
    monkeypatch.setattr(diagnose, "examine_policy", lambda plan: [])
    monkeypatch.setattr(sampling_speed, "check", lambda plan: [green("pace", f"of {plan.run.run.name}")])
    code = diagnose.diagnose(Path("run.toml"), ["--run.name", "new"], engine="local", measure=True)
    lines = capsys.readouterr().out
    assert ("of new" in lines, "not measured, because of the red findings" in lines) == (code == 0, code == 2)
    assert (code == 2) == (level is Level.RED)


def test_flag_without_a_run_file_is_refused():
    with pytest.raises(UserError, match="--measure needs a run file; add --config FILE"):
        diagnose.diagnose(None, [], engine="auto", measure=True)
