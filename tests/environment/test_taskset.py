"""Harbor tasks as verifiers tasks."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from test_retries import record
from test_rollout_details import empty_trace

from harbortrainer.environment.harness import attach_record
from harbortrainer.environment.plugin_config import HarborTasksetConfig
from harbortrainer.environment.rollout_state import HarborState, trace_error
from harbortrainer.environment.taskset import HarborTaskData, HarborTaskset
from harbortrainer.errors import UserError
from harbortrainer.tasks.passed_checks import record_passed
from harbortrainer.tasks.task_folder import load_folder
from harbortrainer.trials.outcome import Outcome
from harbortrainer.trials.record import StepRecord


def taskset(folder: str, **keys) -> HarborTaskset:
    return HarborTaskset(HarborTasksetConfig(tasks_dir=folder, **keys))


def test_taskset_has_every_task_with_key_and_prompt(sample_tasks: str) -> None:
    refs = load_folder(sample_tasks)
    tasks = list(taskset(sample_tasks))
    assert [(t.data.name, t.key, t.data.prompt) for t in tasks] == [(r.name, r.key, r.instruction) for r in refs]
    assert len({task.key for task in tasks}) == len(tasks)


def test_task_data_round_trips_as_json(sample_tasks: str) -> None:
    task = next(iter(taskset(sample_tasks)))
    again = HarborTaskData.model_validate(task.data.model_dump(mode="json"))
    assert again == task.data
    assert type(task)(again).key == task.key


def test_split_sides_are_disjoint_and_complete(sample_tasks: str) -> None:
    names = {
        side: {t.data.name for t in taskset(sample_tasks, split=side, eval_share=0.4)}
        for side in ("train", "eval", "all")
    }
    assert names["train"] | names["eval"] == names["all"]
    assert not names["train"] & names["eval"]
    assert names["train"] and names["eval"]


def test_checked_only_selects_tasks_that_passed_in_current_version(
    sample_tasks: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="none of these tasks passed the check"):
        list(taskset(sample_tasks, checked_only=True))
    first, second, *_ = load_folder(sample_tasks)
    record_passed([first, replace(second, key="of an earlier content")])
    assert [task.key for task in taskset(sample_tasks, checked_only=True)] == [first.key]


def test_taskset_reports_source_and_left_out_tasks(sample_tasks: str, tmp_path: Path) -> None:
    good, bad = tmp_path / "tasks" / "good", tmp_path / "tasks" / "bad"
    shutil.copytree(Path(sample_tasks) / "csv-clean", good)
    bad.mkdir()
    (bad / "task.toml").write_text("no toml")
    loaded = taskset(str(tmp_path / "tasks"), skip_bad=True)
    assert [task.data.name for task in loaded] == ["good"]
    assert loaded.selection is not None and loaded.selection.source == str(tmp_path / "tasks")
    assert [str(bad) in line for line in loaded.selection.left_out] == [True]


def test_missing_folder_is_reported_on_load(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such folder"):
        list(taskset(str(tmp_path / "nowhere")))


async def rollout(sample_tasks: str, outcome: Outcome):
    task = next(iter(taskset(sample_tasks))).for_episode()
    trace = empty_trace()
    trace.state = HarborState()
    await task.setup(trace, None)
    attach_record(trace, record(outcome))
    trace.state.failure = trace_error(record(outcome), trace.state.attempts)
    return task, trace


async def test_reward_is_the_verifiers(sample_tasks: str) -> None:
    task, trace = await rollout(sample_tasks, Outcome.turn_limit)
    await task.finalize(trace, None)
    await task.score(trace)
    assert trace.reward == 0.5
    assert trace.metrics["outcome_turn_limit"] == 1.0


@pytest.mark.parametrize("outcome", [Outcome.turn_limit, Outcome.context_limit, Outcome.output_limit])
async def test_trial_at_limit_is_truncated(sample_tasks: str, outcome: Outcome) -> None:
    task, trace = await rollout(sample_tasks, outcome)
    assert trace.is_truncated
    await task.finalize(trace, None)


async def test_trial_without_limit_is_not_truncated(sample_tasks: str) -> None:
    _, trace = await rollout(sample_tasks, Outcome.agent_timeout)
    assert not trace.is_truncated and trace.stop_condition is None


async def test_stopped_trace_without_reward_raises(sample_tasks: str) -> None:
    task, trace = await rollout(sample_tasks, Outcome.verifier_error)
    trace.stop("max_turns")
    with pytest.raises(Exception, match=r"^verifier_error:"):
        await task.finalize(trace, None)


async def test_trial_that_never_ended_raises(sample_tasks: str) -> None:
    task = next(iter(taskset(sample_tasks))).for_episode()
    trace = empty_trace()
    trace.state = HarborState()
    with pytest.raises(Exception, match=r"^cancelled:"):
        await task.finalize(trace, None)


def test_all_numbers_of_record_are_metrics() -> None:
    full = record(Outcome.completed).model_copy(
        update={"rewards": {"speed": 1.0, "style": float("nan")}, "turns": 3, "parse_errors": 1}
    )
    full.timings.verifier = 2.0
    assert full.metrics() == {
        **{f"outcome_{outcome}": float(outcome is Outcome.completed) for outcome in Outcome},
        "failed_attempts": 0,
        "time_start_wait": 0.0,
        "excused_starts": 0,
        "turns": 3,
        "parse_errors": 1,
        "steps_without_turn": 0,
        "tokens_prompt": 0,
        "tokens_completion": 0,
        "time_verifier": 2.0,
        "reward_speed": 1.0,
    }


@pytest.mark.parametrize("outcome", [Outcome.model_error, Outcome.sandbox_error, Outcome.timeout_masked])
def test_rewards_of_untrainable_trial_are_no_metrics(outcome: Outcome) -> None:
    """A server that is down leaves 0 behind: `reward_<key>/mean` is over what `reward/mean` is over."""
    numbers = record(outcome).model_copy(update={"rewards": {"speed": 0.0}}).metrics()
    assert [name for name in numbers if name.startswith("reward_")] == []


def test_changed_tools_metric_only_for_trials_without_failure() -> None:
    changed = {"changed_files": [], "changed_tools": ["python3 was replaced"]}
    assert record(Outcome.tampered).model_copy(update=changed).metrics()["changed_tools"] == 1.0
    assert "changed_tools" not in record(Outcome.sandbox_error).model_copy(update=changed).metrics()


def test_steps_without_turn_counts_graded_steps() -> None:
    graded, lost = (
        StepRecord(name="s", outcome=Outcome.completed, rewards=r, turns=0) for r in ({"reward": 0.0}, None)
    )
    assert record(Outcome.turn_limit).model_copy(update={"steps": [graded]}).metrics()["steps_without_turn"] == 1
    assert record(Outcome.agent_error).model_copy(update={"steps": [lost]}).metrics()["steps_without_turn"] == 0
