"""Many episodes that are requested at once do not block the event loop together."""

import asyncio
from collections import Counter
from types import SimpleNamespace

import pytest
from verifiers.v1.clients import ModelContext
from verifiers.v1.configs.client import TrainClientConfig
from verifiers.v1.env import Env

from harbortrainer.environment.environment import HarborEnvironment
from harbortrainer.environment.verifiers_compat import SamplingConfig

EPISODES = 100


async def test_burst_of_episodes_is_spread_over_turns_of_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    loop, turn, starts = asyncio.get_running_loop(), 0, Counter[int]()

    def tick() -> None:
        nonlocal turn
        turn += 1
        if starts.total() < EPISODES:
            loop.call_soon(tick)

    async def start(*_: object) -> None:
        starts[turn] += 1

    monkeypatch.setattr(Env, "run_slot", start)
    client = TrainClientConfig(base_url="http://127.0.0.1:9/v1")
    ctx = ModelContext(client=client, model="m", sampling=SamplingConfig())
    env = HarborEnvironment.__new__(HarborEnvironment)
    tick()
    async with asyncio.timeout(60):
        await asyncio.gather(*(env.run_slot(SimpleNamespace(task=None), ctx) for _ in range(EPISODES)))  # ty: ignore[invalid-argument-type]
    assert starts.total() == EPISODES
    assert max(starts.values()) <= EPISODES / 10
