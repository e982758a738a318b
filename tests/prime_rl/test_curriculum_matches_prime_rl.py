"""Our pools and gates draw and admit the same tasks as Prime-RL's code, imported from the submodule."""

import importlib.util
import os
import random
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from harbortrainer.config.algorithm_config import CurriculumConfig, GateConfig, PoolConfig, PoolSampling
from harbortrainer.engines.local.rollouts.curriculum import Curriculum, DifficultyPools
from harbortrainer.engines.local.rollouts.group import Group
from harbortrainer.engines.local.rollouts.rollout import Rollout
from harbortrainer.engines.local.rollouts.schedule import Plan
from harbortrainer.trials.outcome import Outcome

SOURCE = Path(os.environ.get("HARBORTRAINER_PRIME_RL", Path(__file__).parents[2] / "prime-rl"))
PACKAGE = SOURCE / "src/prime_rl/orchestrator/curriculum"

pytestmark = [
    pytest.mark.prime_rl,
    pytest.mark.skipif(not PACKAGE.exists(), reason="needs the populated submodule prime-rl"),
]
KEYS = [f"key-{number}" for number in range(7)]
CUSTOM_POOLS = {"easy": PoolConfig(threshold=0.9, weight=0.1), "rest": PoolConfig(threshold=0.3, weight=2.5)}


@pytest.fixture
def prime_rl(monkeypatch):
    """Return a function that imports one module of Prime-RL's curriculum."""

    def load(name: str) -> ModuleType:
        spec = importlib.util.spec_from_file_location(name, SOURCE / "src" / (name.replace(".", "/") + ".py"))
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, name, module)
        spec.loader.exec_module(module)
        return module

    for package in ("prime_rl", "prime_rl.orchestrator", "prime_rl.orchestrator.curriculum"):
        monkeypatch.setitem(sys.modules, package, ModuleType(package))
    for package in ("samplers", "gates"):
        name = f"prime_rl.orchestrator.curriculum.{package}"
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
        load(f"{name}.base")
    return load


def episodes(key: str, rewards: list[float | None], advantages: list[list[float]]) -> list:
    """Return a finished group as Prime-RL's episodes: one trace each, with an error if the reward is None."""
    task = SimpleNamespace(key=key)
    traces = [
        SimpleNamespace(
            reward=reward or 0.0,
            has_error=reward is None,
            agent=SimpleNamespace(trainable=True),
            nodes=[SimpleNamespace(advantages=None), SimpleNamespace(advantages=values)],
        )
        for reward, values in zip(rewards, advantages, strict=True)
    ]
    return [SimpleNamespace(task=task, traces=[trace]) for trace in traces]


@pytest.mark.parametrize(
    "config", [PoolSampling(), PoolSampling(seed=7, pools=CUSTOM_POOLS)], ids=["default", "custom"]
)
def test_pools_draw_same_tasks_as_prime_rl(prime_rl, config):
    sampler = prime_rl("prime_rl.orchestrator.curriculum.samplers.pool").DifficultyPoolSampler
    theirs = sampler(config, [SimpleNamespace(key=key) for key in KEYS])
    ours, rng = DifficultyPools(config, KEYS, {}), random.Random(0)
    for _ in range(300):
        index = ours.draw()
        assert KEYS[index] == next(theirs).key
        rewards = [rng.choice([None, 0.0, 0.25, 0.5, 0.75, 1.0, 1.5]) for _ in range(4)]
        theirs.observe(episodes(KEYS[index], rewards, [[] for _ in rewards]))
        ours.observe(KEYS[index], [reward for reward in rewards if reward is not None])
        assert [ours.pool(key) for key in KEYS] == [theirs.task_pool(key) for key in KEYS]
        assert ours.metrics() == theirs.metrics()


@pytest.mark.parametrize("gate", [GateConfig(), GateConfig(reject_min=-0.25, reject_max=0.3)], ids=str)
def test_gates_admit_same_groups_as_prime_rl(prime_rl, gate):
    theirs = prime_rl("prime_rl.orchestrator.curriculum.gates.adv").AdvRangeGate(gate)
    ours, rng = Curriculum(CurriculumConfig(gates={"one": gate}), KEYS), random.Random(0)
    decisions = set()
    for _ in range(200):
        rewards = [rng.choice([None, 0.0, 0.5, 1.0]) for _ in range(4)]
        group = Group("g", Plan("s", 0), len(rewards), started=True)
        for number, reward in enumerate(rewards):
            sample: list = [] if reward is None else [object()]
            group.add(Rollout(source="s", outcome=Outcome.completed, reward=reward, samples=sample, trial=str(number)))
        group_advantages = iter(group.advantages())
        advantages = [[] if reward is None else [next(group_advantages)] * 3 for reward in rewards]
        admitted = ours.on_result(group)
        assert admitted == theirs.admit(episodes("key-0", rewards, advantages))
        decisions.add(admitted)
    assert decisions == {True, False}
