"""Curricula: gates reject groups, pools choose tasks, and a resume draws the same tasks."""

import asyncio
import json

import pytest
from loop_fakes import group_of, rollout
from pydantic import ValidationError
from scripted_run import FakeComponents, ScriptedRun, ScriptedTask

from harbortrainer.config.algorithm_config import Algo, CurriculumConfig
from harbortrainer.engines.local.rollouts.batch import MAX_EMPTY_BATCHES, Batches, OffPolicyBound
from harbortrainer.engines.local.rollouts.curriculum import Curriculum
from harbortrainer.engines.local.rollouts.dispatcher import Dispatcher
from harbortrainer.engines.local.rollouts.schedule import Schedule
from harbortrainer.errors import RunStoppedError, UserError
from harbortrainer.runs.checkpoints import latest

pytestmark = pytest.mark.torch  # the weight update

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
def test_gate_rejects_group_with_all_advantages_in_range(rewards, table, admitted):
    assert curriculum(table).on_result(group_of(rewards)) is admitted


def test_pools_start_from_measured_scores():
    measured = {"a": 0.1, "b": 0.9, "another task": 0.5}
    loaded = Curriculum(CurriculumConfig.model_validate(POOLS), KEYS, measured)
    assert loaded.pools is not None
    assert [loaded.pools.pool(key) for key in KEYS] == ["hard", "easy", None, None]
    assert loaded.metrics()["sampler/pool/unseen"] == 2.0
    loaded.on_result(group_of([1.0, 1.0]))  # the first task
    assert loaded.pools.pool("a") == "easy"
    loaded.pools.restore({"c": 0.5}, drawn=0)
    assert [loaded.pools.pool(key) for key in KEYS] == [None, None, "normal", None], "restore replaces all scores"


def test_admission_rate_covers_last_step():
    loaded = curriculum(SIGNAL)
    for rewards in ([1.0, 1.0], [1.0, 0.0], [0.0, 0.0], [0.0, 0.0]):
        loaded.on_result(group_of(rewards))
    assert loaded.metrics() == {"admission_rate": 0.25}
    assert loaded.metrics() == {}
    for rewards in ([None, None], [1.0, None]):  # as Prime-RL counts groups that lost trials
        loaded.on_result(group_of(rewards))
    assert loaded.metrics() == {"admission_rate": 0.5}


def test_pool_follows_latest_group_and_ignores_failures():
    loaded = curriculum(POOLS)
    for rewards in ([1.0, 1.0], [0.5, 0.0, None], [None, None]):
        loaded.on_result(group_of(rewards))
    assert loaded.pools is not None
    assert (loaded.pools.pool("a"), loaded.pools.pool("b")) == ("hard", None)
    assert loaded.metrics()["sampler/pool/hard"] == 1.0
    assert loaded.metrics()["sampler/pool/unseen"] == 3.0


def test_pool_of_weight_0_is_not_drawn():
    pools = {"solved": {"threshold": 1.0, "weight": 0.0}, "open": {"threshold": 0.9, "weight": 1.0}}
    loaded = curriculum({"sampler": {"type": "difficulty_pool", "pools": pools}}, ["a", "b"])
    assert loaded.pools is not None
    loaded.pools.observe("a", [1.0])
    assert {loaded.pools.draw() for _ in range(20)} == {1}
    loaded.pools.observe("b", [1.0])
    with pytest.raises(RunStoppedError, match="all 2 tasks are in difficulty pools of weight 0"):
        loaded.pools.draw()


def test_refuses_pools_with_duplicate_tasks():
    curriculum({}, ["a", "a"])
    with pytest.raises(UserError, match="more than once"):
        curriculum(POOLS, ["a", "a"])


@pytest.mark.parametrize(
    ("sampler", "message"),
    [
        ({"pools": {}}, "no pool"),
        ({"pools": {"a": {"threshold": 1, "weight": 1}, "b": {"threshold": 1, "weight": 1}}}, "the same threshold"),
        ({"pools": {"a": {"threshold": 1, "weight": 0}}}, "weight 0"),
        ({"pools": {"a": {"threshold": 1, "weight": -1}}}, "greater than or equal to 0"),
    ],
)
def test_refuses_invalid_pools(sampler, message):
    with pytest.raises(ValidationError, match=message):
        CurriculumConfig.model_validate({"sampler": {"type": "difficulty_pool", **sampler}})


def test_resume_draws_same_tasks():
    def schedule() -> Schedule:
        return Schedule({"s": 4}, {"s": 1.0}, seed=0, curricula={"s": curriculum(POOLS)})

    original = schedule()
    for reward in (0.0, 1.0, 0.5, 0.0, 1.0, 1.0):
        original.next()
        group = group_of([reward, reward])
        group.plan = original.next()
        original.on_result(group)
    state = json.loads(json.dumps(original.state()))
    resumed = schedule()
    resumed.restore(state)
    assert [resumed.next() for _ in range(50)] == [original.next() for _ in range(50)]
    assert resumed.metrics()["curriculum/s/sampler/pool/unseen"] < 4


def test_run_stops_if_gate_rejects_everything():
    batches = Batches(batch_size=4, bound=OffPolicyBound(2))
    with pytest.raises(RunStoppedError, match=r"rejected by a gate of the curriculum .*too hard"):
        for _ in range(MAX_EMPTY_BATCHES * 2):
            batches.add(group_of([0.0, 0.0]), admitted=False)
    assert len(batches.arrived) == MAX_EMPTY_BATCHES * 2


def small_run(folder, table: dict, steps: int) -> ScriptedRun:
    components = FakeComponents(
        [
            ScriptedTask("signal", [1.0, 0.0, 1.0, 0.0]),
            ScriptedTask("equal", [1.0] * 4),
            ScriptedTask("never", [0.0] * 4),
        ]
    )
    components.curriculum = Curriculum(CurriculumConfig.model_validate(table), [components.key_of(i) for i in range(3)])
    return ScriptedRun(folder, steps=steps, components=components)


def metrics_of(run: ScriptedRun) -> list[dict]:
    return [json.loads(line) for line in run.folder.metrics_file.read_text().splitlines()]


def test_gate_admits_groups_with_signal_only(tmp_path):
    run = small_run(tmp_path, SIGNAL, 3)
    asyncio.run(run.train())
    assert [len(samples) for samples in run.components.trained] == [8, 8, 8]
    rows = [json.loads(row) for path in run.folder.rollouts.iterdir() for row in path.read_text().splitlines()]
    reasons = {(row["task"], row["not_trained"]) for row in rows}
    assert reasons == {("signal", None), ("equal", "rejected by a gate"), ("never", "rejected by a gate")}
    rates = [line.get("curriculum/scripted/admission_rate", 0.5) for line in metrics_of(run)]
    assert all(0 < rate < 1 for rate in rates)
    assert [line["batch/empty"] for line in metrics_of(run)] == [0.0] * 3


def test_pools_state_is_in_checkpoint(tmp_path):
    weights = {
        name: {"threshold": at, "weight": w} for name, at, w in (("never", 0.2, 0), ("some", 0.8, 1), ("all", 1, 0))
    }
    run = small_run(tmp_path, {"sampler": {"type": "difficulty_pool", "pools": weights}}, 6)
    asyncio.run(run.train())
    last = metrics_of(run)[-1]
    names = ("unseen", "never", "some", "all")
    assert [last[f"curriculum/scripted/sampler/pool/{name}"] for name in names] == [0, 1, 1, 1]
    found = latest(run.folder.checkpoints)
    assert found is not None
    assert found[1].schedule is not None
    assert found[1].schedule["task_rewards"]["scripted"] == {"key-0": 0.5, "key-1": 1.0, "key-2": 0.0}


class OneTask:
    """A source with one task, in groups of two."""

    name, group_size, algo, tasks = "s", 2, Algo(), ["k0"]

    def key_of(self, index: int) -> str:
        return "k0"

    def rollout(self, index: int):
        return rollout(None)


async def test_groups_in_flight_may_return_a_task_to_a_pool():
    """The first group moves the only task into a pool of weight 0; the second one, in flight, moves it back."""
    limits = {"hard": (0.25, 0.0), "normal": (0.9, 1.0), "easy": (1.0, 0.0)}
    pools = {name: {"threshold": threshold, "weight": weight} for name, (threshold, weight) in limits.items()}
    loaded = curriculum({"sampler": {"type": "difficulty_pool", "pools": pools}}, ["k0"])
    schedule = Schedule({"s": 1}, {"s": 1.0}, seed=0, curricula={"s": loaded})
    slow = asyncio.Event()

    class Client:
        count = 0

        async def run_rollout(self, stream, index, *, on_start):
            self.count += 1
            number = self.count
            if number > 2:
                await slow.wait()
            return rollout(1.0 if number <= 2 else float(number % 2))

    batches = Batches(batch_size=2, bound=OffPolicyBound(1))
    running = Dispatcher({"s": OneTask()}, schedule, batches, Client(), step=0, last_step=9)  # ty: ignore[invalid-argument-type]
    waiting = asyncio.create_task(running.batch(1))
    await asyncio.sleep(0.1)
    assert running.no_task is not None and not waiting.done()
    slow.set()
    assert len((await asyncio.wait_for(waiting, 10)).groups) >= 1
    await running.stop()
