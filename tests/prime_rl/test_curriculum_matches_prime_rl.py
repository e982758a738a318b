"""Our pools and gates against Prime-RL's own code, imported from the submodule: the same draws, the same verdicts."""

import importlib.util
import os
import random
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from harbortrainer.config.curriculum_table import CurriculumConfig, GateConfig, PoolConfig, PoolSampling
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
OWN = {"easy": PoolConfig(threshold=0.9, weight=0.1), "rest": PoolConfig(threshold=0.3, weight=2.5)}


@pytest.fixture
def prime_rl(monkeypatch):
    """Imports one file of Prime-RL's curriculum, and what it imports of it."""

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
    """Prime-RL's side of a finished group: one trace each, an error for None."""
    task = SimpleNamespace(key=key)
    traces = [
        SimpleNamespace(
            reward=reward or 0.0,
            has_error=reward is None,
            agent=SimpleNamespace(trainable=True),
            nodes=[SimpleNamespace(advantages=None), SimpleNamespace(advantages=own)],
        )
        for reward, own in zip(rewards, advantages, strict=True)
    ]
    return [SimpleNamespace(task=task, traces=[trace]) for trace in traces]


@pytest.mark.parametrize("config", [PoolSampling(), PoolSampling(seed=7, pools=OWN)], ids=["default", "own"])
def test_pools_draw_what_prime_rl_draws(prime_rl, config):
    sampler = prime_rl("prime_rl.orchestrator.curriculum.samplers.pool").DifficultyPoolSampler
    theirs = sampler(config, [SimpleNamespace(key=key) for key in KEYS])
    ours, dice = DifficultyPools(config, KEYS, {}), random.Random(0)
    for _ in range(300):
        index = ours.draw()
        assert KEYS[index] == next(theirs).key
        rewards = [dice.choice([None, 0.0, 0.25, 0.5, 0.75, 1.0, 1.5]) for _ in range(4)]
        theirs.observe(episodes(KEYS[index], rewards, [[] for _ in rewards]))
        ours.observe(KEYS[index], [reward for reward in rewards if reward is not None])
        assert [ours.pool(key) for key in KEYS] == [theirs.task_pool(key) for key in KEYS]
        assert ours.metrics() == theirs.metrics()


@pytest.mark.parametrize("gate", [GateConfig(), GateConfig(reject_min=-0.25, reject_max=0.3)], ids=str)
def test_gates_admit_what_prime_rl_admits(prime_rl, gate):
    theirs = prime_rl("prime_rl.orchestrator.curriculum.gates.adv").AdvRangeGate(gate)
    ours, dice = Curriculum(CurriculumConfig(gates={"one": gate}), KEYS), random.Random(0)
    verdicts = set()
    for _ in range(200):
        rewards = [dice.choice([None, 0.0, 0.5, 1.0]) for _ in range(4)]
        group = Group("g", Plan("s", 0), len(rewards), started=True)
        for number, reward in enumerate(rewards):
            sample: list = [] if reward is None else [object()]
            group.add(Rollout(source="s", outcome=Outcome.completed, reward=reward, samples=sample, trial=str(number)))
        given = iter(group.advantages())
        advantages = [[] if reward is None else [next(given)] * 3 for reward in rewards]
        admitted = ours.on_result(group)
        assert admitted == theirs.admit(episodes("key-0", rewards, advantages))
        verdicts.add(admitted)
    assert verdicts == {True, False}
