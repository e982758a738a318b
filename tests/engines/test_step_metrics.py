"""Metrics of a step."""

import math

import pytest
from loop_fakes import group_of

from harbortrainer.config.run_sections import Prices
from harbortrainer.engines.local.rollouts.batch import Batches, OffPolicyBound
from harbortrainer.engines.local.rollouts.group import Group
from harbortrainer.engines.local.rollouts.schedule import Plan
from harbortrainer.engines.local.step_metrics import (
    Stopwatch,
    batch_metrics,
    cost_metrics,
    distribution,
    environment_metrics,
    source_metrics,
)
from harbortrainer.trials.outcome import Outcome


def test_distribution_interpolates_percentiles():
    metrics = distribution("x", [0.0, 1.0, 2.0, 3.0, 4.0])
    assert metrics["x/mean"] == 2.0
    assert math.isclose(metrics["x/p90"], 3.6)


def test_step_metrics_separate_outcomes_rewards_and_age():
    bound = OffPolicyBound(2)
    batches = Batches(batch_size=4, bound=bound)
    batches.add(group_of([None, None], version=1))
    batches.add(group_of([1.0, 0.0], version=1))
    batches.add(group_of([1.0, 1.0], version=2))
    metrics = batch_metrics(batches.cut(3), bound, ["tasks"])
    assert metrics["train/agg/all/agent/metrics/outcome_sandbox_error/mean"] == pytest.approx(1 / 3)
    assert metrics["train/agg/all/agent/reward/mean"] == 0.75
    assert metrics["train/agg/effective/agent/reward/mean"] == 0.5
    assert metrics["train/agg/all/agent/solved_all"] == 0.5
    assert (metrics["off_policy/mean"], metrics["off_policy/max"]) == (1.0, 1.0)
    assert metrics["progress/trained"] == 2.0
    assert metrics["progress/rollouts"] == 6.0


def test_wasted_tokens_are_in_no_comparison():
    """3 trained, 5 had no signal; 7 failed, 11 in a lost group, 13 too old, 17 discarded and 2 late are wasted."""
    bound = OffPolicyBound(0)
    batches = Batches(batch_size=4, bound=bound)
    trained, equal, lost, old = [group_of(it) for it in ([1.0, 0.0, None], [1.0, 1.0], [1.0, None], [1.0, 0.0])]
    counts = [(trained, (1, 2, 7)), (equal, (2, 3)), (lost, (11, 0)), (old, (6, 7))]
    for group, tokens in counts:
        for rollout, count in zip(group.rollouts, tokens, strict=True):
            rollout.output_tokens = rollout.logged_tokens = count
    trained.rollouts[0].logged_tokens += 2  # a late completion
    batches.drop(old)
    for group in (lost, trained, equal):
        batches.add(group)
    metrics = batch_metrics(batches.cut(1), bound, ["tasks"], discarded=17)
    assert metrics["tokens/wasted"] == pytest.approx(50 / 58)


def test_cancelled_trial_is_in_no_share():
    """`all` covers returned trials only; shares times `progress/rollouts` are counts."""
    bound = OffPolicyBound(0)
    batches = Batches(batch_size=2, bound=bound)
    old = group_of([None, None, None])
    for rollout in old.rollouts[1:]:
        rollout.outcome = Outcome.cancelled
    batches.drop(old)
    batches.add(group_of([1.0, 0.0]))
    metrics = batch_metrics(batches.cut(1), bound, ["tasks"])
    shares = {name: metrics[f"train/agg/all/agent/metrics/outcome_{name}/mean"] for name in Outcome}
    assert shares[Outcome.sandbox_error] == pytest.approx(1 / 3) == metrics["train/agg/all/has_error/mean"]
    assert (shares[Outcome.cancelled], metrics["progress/rollouts"], metrics["off_policy/dropped"]) == (0.0, 3.0, 3.0)


@pytest.mark.parametrize("begun", [0, 1])
def test_refill_counts_once_it_has_a_slot(begun):
    """The first trial of an old group failed; its refill waits for a slot, or plays, when the group is cancelled."""
    bound = OffPolicyBound(0)
    batches = Batches(batch_size=2, bound=bound)
    old, failed = Group(id="old", plan=Plan("s", 0), size=2), group_of([None]).rollouts[0]
    old.start(0)
    old.begin()
    old.begin()
    assert old.refill(failed)
    old.add(failed)
    for _ in range(begun):
        old.begin()
    batches.drop(old)
    batches.add(group_of([1.0, 0.0]))
    assert batch_metrics(batches.cut(1), bound, ["tasks"])["batch/refills"] == begun


def test_source_share_is_0_without_trials():
    few, many = group_of([1.0, 0.0]), group_of([1.0, 0.0, 0.0])
    for source, group in (("few", few), ("many", many)):
        for rollout in group.rollouts:
            rollout.source = source
    metrics = source_metrics([*few.rollouts, *many.rollouts], ["none", "many", "few"])
    assert {name: metrics[f"batch/{name}"] for name in ("few", "many", "none")} == {
        "few": 0.4,
        "many": 0.6,
        "none": 0.0,
    }
    assert metrics["train/many/all/agent/reward/mean"] == pytest.approx(1 / 3)
    assert "train/none/all/agent/reward/mean" not in metrics, "no trials, so no mean"
    assert source_metrics(few.rollouts, ["few"]) == {}


def test_reward_has_one_metric_name():
    group = group_of([1.0, 0.0])
    for rollout in group.rollouts:
        rollout.metrics = {"reward_reward": rollout.reward or 0.0, "reward_style": 0.5}
    metrics = environment_metrics("all", group.rollouts)
    assert metrics == {"all/agent/metrics/reward_style/mean": 0.5}


def test_lap_resets_stopwatch():
    watch = Stopwatch()
    with watch.timed("time/train"):
        pass
    watch.metrics["loss/mean"] = 1.0
    first, second = watch.lap(), watch.lap()
    assert {"time/train", "time/step", "loss/mean"} <= first.keys()
    assert set(second) == {"time/step"}


def test_rates_cover_last_step():
    watch = Stopwatch()
    watch.rates({"sampled_tokens": 100.0, "busy_s": 1.0})
    rates = watch.rates({"sampled_tokens": 400.0, "busy_s": 2.0})
    assert rates["perf/sampled_tokens_per_s"] == 300.0


def test_step_costs_per_solved_task():
    rollouts = [*group_of([1.0, 0.5, None], version=1).rollouts, *group_of([0.0, None], version=1).rollouts]
    for rollout in rollouts:
        rollout.prompt_tokens, rollout.sampled_tokens = 1000, 100
    prices = Prices(prompt=2.0, sampled=10.0, hour=3.6)
    cost = 5 * (1000 * 2 + 100 * 10) / 1e6 + 60 * 3.6 / 3600
    assert cost_metrics(rollouts, prices, 60.0) == pytest.approx({"cost/step": cost, "cost/solved_task": cost})
    assert cost_metrics(rollouts[-2:], prices, 0.0) == pytest.approx({"cost/step": 0.006})
