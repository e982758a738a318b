"""Evaluation: repeatable rollouts and seeds, and means without failed trials."""

import asyncio
from dataclasses import dataclass, field, replace

import pytest
from loop_fakes import rollout, sample
from view_runs import trains_on_evaluated_tasks

from harbortrainer.config.runfile import RunConfig
from harbortrainer.engines.local import evaluation
from harbortrainer.engines.local.evaluation import Evaluator, eval_metrics, eval_result, plan_evaluation, sources_at
from harbortrainer.engines.local.rollouts.rollout import Rollout
from harbortrainer.errors import RunStoppedError
from harbortrainer.estimates.interval import mean_reward
from harbortrainer.runs.display import Display
from harbortrainer.runs.folder import RunFolder
from harbortrainer.runs.summary import evaluated_sources
from harbortrainer.runs.transcript_files import TranscriptWriter


@dataclass
class TwoTasks:
    """A source with two tasks."""

    name: str = "held-out"
    group_size: int = 2
    tasks: list[str] = field(default_factory=lambda: ["a", "b"])

    def key_of(self, index: int) -> str:
        return f"key-{index}"


def test_rollout_seeds_are_unique_and_repeatable():
    plans = plan_evaluation([TwoTasks()], seed=1)  # ty: ignore[invalid-argument-type]
    assert [plan.index for plan in plans] == [0, 0, 1, 1]
    assert len({plan.seed for plan in plans}) == 4
    assert plans == plan_evaluation([TwoTasks()], seed=1)  # ty: ignore[invalid-argument-type]
    assert plans != plan_evaluation([TwoTasks()], seed=2)  # ty: ignore[invalid-argument-type]


def test_mean_excludes_failed_trial():
    result = eval_result([rollout(1.0), rollout(0.0), rollout(None)])
    assert (result.mean_reward, result.n, result.tasks) == (0.5, 2, 1)


def test_result_equals_eval_command():
    rollouts = [replace(rollout(reward), task_key=task) for task, reward in (("a", 1.0), ("a", 0.0), ("b", 0.0))]
    result, estimate = eval_result(rollouts), mean_reward({"a": [1.0, 0.0], "b": [0.0]})
    assert (result.mean_reward, result.stderr) == (0.25, 0.25)  # a trial-weighted mean would be 1/3
    assert (result.low, result.high, result.n) == (estimate.low, estimate.high, 3)
    assert str(result) == "0.250 [0.000, 1.000] (2 tasks, 3 trials)"


def test_no_graded_trial_has_no_mean():
    assert eval_result([rollout(None)]).mean_reward is None


def test_metrics_have_source_and_outcomes():
    metrics = eval_metrics([rollout(1.0), rollout(None)], {"s": 1})
    assert metrics["eval/s/all/agent/avg@1"] == 1.0
    assert metrics["eval/s/all/agent/metrics/outcome_sandbox_error/mean"] == 0.5


def test_source_is_due_at_its_interval():
    assert sources_at(6, {"a": 2, "b": 4, "c": 3}) == ["a", "c"]


def test_pass_at_k_needs_one_solved_trial():
    metrics = eval_metrics([rollout(reward) for reward in (1.0, 0.0, 0.0, 0.0)], {"s": 4})
    passes = {name.rpartition("/")[2]: value for name, value in metrics.items() if "pass" in name}
    assert passes == {"pass@1": 0.25, "pass@2": 0.5, "pass@4": 1.0, "pass^1": 0.25, "pass^2": 0.0, "pass^4": 0.0}


def test_partial_rewards_have_no_pass_at_k():
    assert not any("pass" in name for name in eval_metrics([rollout(0.5)], {"s": 1}))


class FakeClient:
    """A client whose rollouts get a reward of 1."""

    async def run_rollout(self, stream: TwoTasks, index: int, *, seed: int) -> Rollout:
        return replace(rollout(1.0), source=stream.name)


def make_evaluator(run: RunFolder) -> Evaluator:
    env = {"taskset": {"id": "harbor_env", "tasks_dir": "."}}
    orchestrator = {"train": {"source": [{"name": "s", "env": env}]}}
    orchestrator["eval"] = {"source": [{"name": "held-out", "interval": 2, "env": env}]}
    config = RunConfig.model_validate({"model": {"name": "none"}, "orchestrator": orchestrator})
    transcripts = TranscriptWriter(run.path, max_mb=0)
    return Evaluator(config, run, {"held-out": TwoTasks()}, FakeClient(), transcripts, Display())  # ty: ignore[invalid-argument-type]


async def test_line_of_evaluation_says_whether_tasks_are_held_out(tmp_path, capfd):
    run = RunFolder(tmp_path)
    run.rollouts.mkdir()
    await make_evaluator(run).evaluate(2, ["held-out"])
    trains_on_evaluated_tasks(tmp_path)
    await make_evaluator(run).evaluate(4, ["held-out"])
    said = capfd.readouterr()
    assert "held-out tasks after step 2: " in said.err + said.out
    assert "evaluation tasks after step 4: " in said.err + said.out


async def test_steps_do_not_read_all_metrics_again(tmp_path):
    """A run of a week has 100 MB of them."""
    run = RunFolder(tmp_path)
    run.rollouts.mkdir()
    await make_evaluator(run).evaluate(2, ["held-out"])
    evaluator = make_evaluator(run)
    run.metrics_file.unlink()
    assert [evaluator.due_sources(step, last=False) for step in (2, 3, 4)] == [[], [], ["held-out"]]
    await evaluator.evaluate(4, ["held-out"])
    assert evaluator.due_sources(4, last=True) == []


async def test_last_evaluation_covers_all_sources(tmp_path):
    """The run's length was lowered to a step at which one source was due."""
    run = RunFolder(tmp_path)
    run.rollouts.mkdir()
    first = make_evaluator(run)
    first.streams = {"held-out": TwoTasks(), "rare": TwoTasks(name="rare")}  # ty: ignore[invalid-assignment]
    await first.evaluate(2, ["held-out"])
    resumed = make_evaluator(run)
    resumed.streams = first.streams
    assert resumed.due_sources(2, last=False) == []
    assert resumed.due_sources(2, last=True) == ["held-out", "rare"]
    await resumed.evaluate(2, ["held-out", "rare"])
    assert resumed.due_sources(2, last=True) == make_evaluator(run).due_sources(2, last=False) == []
    assert evaluated_sources(run) == {2: {"held-out", "rare"}}


async def test_evaluation_keeps_no_samples_of_its_trials(tmp_path, monkeypatch):
    run = RunFolder(tmp_path)
    run.rollouts.mkdir()
    kept: list[Rollout] = []
    monkeypatch.setattr(evaluation, "eval_result", lambda rollouts: kept.extend(rollouts) or eval_result(rollouts))
    evaluator = make_evaluator(run)

    async def with_samples(stream, index, *, seed):
        return replace(rollout(1.0), source=stream.name, samples=[sample()], transcript=b"packed")

    monkeypatch.setattr(evaluator.client, "run_rollout", with_samples)
    await evaluator.evaluate(2, ["held-out"])
    assert {one.trial for one in kept} and len(kept) >= 4
    assert all((one.samples, one.sampled_turns, one.transcript) == ([], (), b"") for one in kept)


@dataclass
class FailingSandboxes:
    """A client whose sandboxes do not start, except those of some tasks."""

    started: int = 0
    ended: int = 0
    turns: dict[int, int] = field(default_factory=dict)
    """Turns before the sandbox failed, by task."""

    async def run_rollout(self, stream: TwoTasks, index: int, *, seed: int) -> Rollout:
        self.started += 1
        try:
            await asyncio.sleep(self.started / 1000)
        finally:
            self.ended += 1
        return replace(rollout(None), source=stream.name, task_key=stream.tasks[index], turns=self.turns.get(index, 0))


def evaluator_of_failing(run: RunFolder, client: FailingSandboxes) -> Evaluator:
    run.rollouts.mkdir()
    evaluator = make_evaluator(run)
    evaluator.client, evaluator.batch_size = client, 3  # ty: ignore[invalid-assignment]
    return evaluator


async def test_evaluation_without_a_sandbox_stops_after_a_batch(tmp_path):
    evaluator = evaluator_of_failing(RunFolder(tmp_path), client := FailingSandboxes())
    with pytest.raises(RunStoppedError, match=r"^no sandbox started in the first 3 trials: 3 of them sandbox_error \("):
        await evaluator.evaluate(0, ["held-out"])
    assert client.started == client.ended == 4, "the other trials are cancelled"


@pytest.mark.parametrize(
    ("tasks", "turns"), [(["a", "a"], {}), (["a", "b"], {0: 1})], ids=["one task", "a sandbox failed later"]
)
async def test_evaluation_with_a_started_sandbox_is_finished(tmp_path, tasks, turns):
    evaluator = evaluator_of_failing(RunFolder(tmp_path), FailingSandboxes(turns=turns))
    evaluator.streams = {"held-out": TwoTasks(tasks=tasks)}  # ty: ignore[invalid-assignment]
    with pytest.raises(RunStoppedError, match=r"^none of the 4 evaluation trials was graded"):
        await evaluator.evaluate(0, ["held-out"])
