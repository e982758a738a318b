"""Curricula: gates replace groups, pools choose tasks, and a resume draws what the first run would have drawn."""

import asyncio
import json

import pytest
from loop_fakes import group_of
from pydantic import ValidationError
from small_world import Script, SmallRun, World

from harbortrainer.config.curriculum_table import CurriculumConfig
from harbortrainer.engines.local.rollouts.batch import MAX_EMPTY_BATCHES, Batches, OffPolicyBound
from harbortrainer.engines.local.rollouts.curriculum import Curriculum
from harbortrainer.engines.local.rollouts.schedule import Schedule
from harbortrainer.errors import RunStoppedError, UserError
from harbortrainer.runs.progress import latest

KEYS = ["a", "b", "c", "d"]
SIGNAL = {"gates": {"signal": {}}}
POOLS = {"sampler": {"type": "difficulty_pool", "seed": 3}}


def curriculum(table: dict, keys: list[str] = KEYS) -> Curriculum:
    return Curriculum(CurriculumConfig.model_validate(table), keys)


@pytest.mark.parametrize(
    ("rewards", "table", "admitted"),
    [
        ([1.0, 1.0], SIGNAL, False),
        ([1.0, 0.0], SIGNAL, True),
        ([0.7, 0.5], {"gates": {"wide": {"reject_min": -0.2, "reject_max": 0.2}}}, False),
        ([1.0, 0.0], {"gates": {"wide": {"reject_min": -0.2, "reject_max": 0.2}}}, True),
        ([1.0, 0.0], {"gates": {"a": {}, "b": {"reject_min": -1, "reject_max": 1}}}, False),
        ([1.0, 1.0], {}, True),
        ([None, None], SIGNAL, True),
    ],
)
def test_a_gate_rejects_a_group_whose_advantages_all_lie_in_its_range(rewards, table, admitted):
    assert curriculum(table).on_result(group_of(rewards)) is admitted


def test_pools_begin_with_what_was_measured_until_a_task_is_played():
    measured = {"a": 0.1, "b": 0.9, "of another set": 0.5}
    it = Curriculum(CurriculumConfig.model_validate(POOLS), KEYS, measured)
    assert it.pools is not None
    assert [it.pools.pool(key) for key in KEYS] == ["hard", "easy", None, None]
    assert it.metrics()["sampler/pool/unseen"] == 2.0
    it.on_result(group_of([1.0, 1.0]))  # of the first task
    assert it.pools.pool("a") == "easy"
    it.pools.restore({"c": 0.5}, drawn=0)
    assert [it.pools.pool(key) for key in KEYS] == [None, None, "normal", None], "a checkpoint holds all of it"


def test_the_share_that_was_admitted_is_that_since_the_last_step():
    it = curriculum(SIGNAL)
    for rewards in ([1.0, 1.0], [1.0, 0.0], [0.0, 0.0], [0.0, 0.0]):
        it.on_result(group_of(rewards))
    assert it.metrics() == {"admission_rate": 0.25}
    assert it.metrics() == {}


def test_a_task_is_in_the_pool_of_its_latest_group_and_failures_say_nothing():
    it = curriculum(POOLS)
    for rewards in ([1.0, 1.0], [0.5, 0.0, None], [None, None]):
        it.on_result(group_of(rewards))
    assert it.pools is not None
    assert (it.pools.pool("a"), it.pools.pool("b")) == ("hard", None)
    assert it.metrics()["sampler/pool/hard"] == 1.0
    assert it.metrics()["sampler/pool/unseen"] == 3.0


def test_a_pool_of_weight_0_is_not_drawn_from_and_when_nothing_is_left_the_run_says_so():
    pools = {"solved": {"threshold": 1.0, "weight": 0.0}, "open": {"threshold": 0.9, "weight": 1.0}}
    it = curriculum({"sampler": {"type": "difficulty_pool", "pools": pools}}, ["a", "b"])
    assert it.pools is not None
    it.pools.observe("a", [1.0])
    assert {it.pools.draw() for _ in range(20)} == {1}
    it.pools.observe("b", [1.0])
    with pytest.raises(RunStoppedError, match="all 2 tasks are in difficulty pools of weight 0"):
        it.pools.draw()


def test_two_equal_tasks_cannot_have_pools():
    curriculum({}, ["a", "a"])
    with pytest.raises(UserError, match="twice"):
        curriculum(POOLS, ["a", "a"])


@pytest.mark.parametrize(
    ("sampler", "message"),
    [
        ({"pools": {}}, "no pool"),
        ({"pools": {"a": {"threshold": 1, "weight": 1}, "b": {"threshold": 1, "weight": 1}}}, "one threshold"),
        ({"pools": {"a": {"threshold": 1, "weight": 0}}}, "weight 0"),
        ({"pools": {"a": {"threshold": 1, "weight": -1}}}, "greater than or equal to 0"),
    ],
)
def test_pools_that_cannot_be_are_refused(sampler, message):
    with pytest.raises(ValidationError, match=message):
        CurriculumConfig.model_validate({"sampler": {"type": "difficulty_pool", **sampler}})


def test_a_resume_draws_what_the_first_would_have_drawn():
    def schedule() -> Schedule:
        return Schedule({"s": 4}, {"s": 1.0}, seed=0, curricula={"s": curriculum(POOLS)})

    first = schedule()
    for reward in (0.0, 1.0, 0.5, 0.0, 1.0, 1.0):
        first.next()
        group = group_of([reward, reward])
        group.plan = first.next()
        first.on_result(group)
    state = json.loads(json.dumps(first.state()))
    again = schedule()
    again.restore(state)
    assert [again.next() for _ in range(50)] == [first.next() for _ in range(50)]
    assert again.metrics()["curriculum/s/sampler/pool/unseen"] < 4


def test_a_run_whose_gate_rejects_everything_stops_as_in_prime_rl():
    batches = Batches(batch_size=4, bound=OffPolicyBound(2))
    with pytest.raises(RunStoppedError, match=r"rejected by a gate of the curriculum .*too hard"):
        for _ in range(MAX_EMPTY_BATCHES * 2):
            batches.add(group_of([0.0, 0.0]), admitted=False)
    assert len(batches.arrived) == MAX_EMPTY_BATCHES * 2


def small_run(folder, table: dict, steps: int) -> SmallRun:
    world = World([Script("signal", [1.0, 0.0, 1.0, 0.0]), Script("equal", [1.0] * 4), Script("never", [0.0] * 4)])
    world.curriculum = Curriculum(CurriculumConfig.model_validate(table), [world.key_of(i) for i in range(3)])
    return SmallRun(folder, steps=steps, world=world)


def lines(run: SmallRun) -> list[dict]:
    return [json.loads(line) for line in run.run.metrics_file.read_text().splitlines()]


def test_a_gate_fills_each_step_with_groups_that_teach(tmp_path):
    run = small_run(tmp_path, SIGNAL, 3)
    asyncio.run(run.play())
    assert [len(samples) for samples in run.world.taught] == [8, 8, 8]
    rows = [json.loads(row) for path in run.run.rollouts.iterdir() for row in path.read_text().splitlines()]
    reasons = {(row["task"], row["not_trained"]) for row in rows}
    assert reasons == {("signal", None), ("equal", "rejected by a gate"), ("never", "rejected by a gate")}
    rates = [line.get("curriculum/scripted/admission_rate", 0.5) for line in lines(run)]
    assert all(0 < rate < 1 for rate in rates)
    assert [line["batch/empty"] for line in lines(run)] == [0.0] * 3


def test_pools_play_what_teaches_and_their_state_is_in_the_checkpoint(tmp_path):
    weights = {
        name: {"threshold": at, "weight": w} for name, at, w in (("never", 0.2, 0), ("some", 0.8, 1), ("all", 1, 0))
    }
    run = small_run(tmp_path, {"sampler": {"type": "difficulty_pool", "pools": weights}}, 6)
    asyncio.run(run.play())
    last = lines(run)[-1]
    names = ("unseen", "never", "some", "all")
    assert [last[f"curriculum/scripted/sampler/pool/{name}"] for name in names] == [0, 1, 1, 1]
    found = latest(run.run.checkpoints)
    assert found is not None
    assert found[1].schedule is not None
    assert found[1].schedule["task_rewards"]["scripted"] == {"key-0": 0.5, "key-1": 1.0, "key-2": 0.0}
