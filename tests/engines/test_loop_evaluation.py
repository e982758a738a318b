"""Evaluation: the same rollouts and seeds every time, and honest means."""

from dataclasses import dataclass, field

from loop_fakes import rollout

from harbortrainer.engines.local.evaluation import due, eval_metrics, pass_at_k, plan_evaluation, result_of


@dataclass
class TwoTasks:
    """A source with two tasks."""

    name: str = "held-out"
    group_size: int = 2
    tasks: list[str] = field(default_factory=lambda: ["a", "b"])

    def key_of(self, index: int) -> str:
        return f"key-{index}"


def test_every_rollout_of_an_evaluation_has_its_own_seed_and_they_repeat():
    plans = plan_evaluation([TwoTasks()], seed=1)  # ty: ignore[invalid-argument-type]
    assert [plan.index for plan in plans] == [0, 0, 1, 1]
    assert len({plan.seed for plan in plans}) == 4
    assert plans == plan_evaluation([TwoTasks()], seed=1)  # ty: ignore[invalid-argument-type]
    assert plans != plan_evaluation([TwoTasks()], seed=2)  # ty: ignore[invalid-argument-type]


def test_a_failed_trial_is_left_out_of_the_mean():
    result = result_of([rollout(1.0), rollout(0.0), rollout(None)])
    assert (result.mean_reward, result.n) == (0.5, 2)
    assert result.stderr == 0.5


def test_no_graded_trial_has_no_mean():
    assert result_of([rollout(None)]).mean_reward is None


def test_metrics_name_the_source_and_the_outcomes():
    numbers = eval_metrics([rollout(1.0), rollout(None)], {"s": 1})
    assert numbers["eval/s/all/agent/avg@1"] == 1.0
    assert numbers["eval/s/all/agent/outcome/sandbox_error"] == 0.5


def test_each_source_is_due_at_its_own_interval():
    assert due(6, {"a": 2, "b": 4, "c": 3}) == ["a", "c"]


def test_pass_at_k_counts_a_task_as_solved_when_one_of_k_trials_solves_it():
    numbers = pass_at_k([rollout(reward) for reward in (1.0, 0.0, 0.0, 0.0)])
    assert numbers == {"pass@1": 0.25, "pass@2": 0.5, "pass@4": 1.0}


def test_partial_rewards_have_no_pass_at_k():
    assert pass_at_k([rollout(0.5)]) == {}
