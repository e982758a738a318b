"""What stays in the sampler's ledger beside rollouts whose attempts failed."""

import asyncio
from typing import cast

import pytest
from small_world import SEQ_LEN, World
from verifiers.v1.episode import WireEpisode

from harbortrainer.engines.local.playing import Player, TaskStream
from harbortrainer.engines.local.sampler.ledger import Completion, Ledger

SIGNAL, LOST = 0, 2


class Retrying(World):
    """Each trial is the second attempt: the first one sampled under a name that no episode tells."""

    def __init__(self) -> None:
        super().__init__()
        self.gates: dict[int, asyncio.Event] = {}

    async def run(self, index: int, *, seed: int | None = None) -> WireEpisode:
        first = f"first-{self.tasks[index].name}-{self.played[index]}"
        self.ledger.enter(Completion(first, first, 2, (7,), (-0.5,), 0))
        if index in self.gates:
            await self.gates[index].wait()
        return await super().run(index, seed=seed)

    def player(self) -> tuple[Player, TaskStream]:
        return Player(self.ledger, seq_len=SEQ_LEN, max_inflight=None), cast("TaskStream", self)


def sessions(ledger: Ledger, world: World) -> list[str]:
    names = [f"first-{task.name}-{number}" for task in world.tasks for number in range(9)]
    return [name for name in names if ledger.peek(name)]


async def test_what_failed_attempts_sampled_goes_when_nothing_is_in_flight_that_could_ask_for_it() -> None:
    world = Retrying()
    player, stream = world.player()
    for _ in range(3):
        await player.play(stream, SIGNAL)
        assert sessions(world.ledger, world) == []


async def test_a_rollout_in_flight_keeps_what_was_sampled_since_it_began() -> None:
    world = Retrying()
    player, stream = world.player()
    world.gates[LOST] = asyncio.Event()
    await player.play(stream, SIGNAL)
    long = asyncio.create_task(player.play(stream, LOST))
    await asyncio.sleep(0)
    await player.play(stream, SIGNAL)
    assert sessions(world.ledger, world) == ["first-signal-1", "first-lost-0"]
    world.gates[LOST].set()
    assert (await long).task == "lost"
    assert sessions(world.ledger, world) == []


async def test_a_rollout_that_is_cancelled_leaves_nothing_when_the_next_one_ends() -> None:
    world = Retrying()
    player, stream = world.player()
    world.gates[LOST] = asyncio.Event()
    long = asyncio.create_task(player.play(stream, LOST))
    await asyncio.sleep(0)
    long.cancel()
    with pytest.raises(asyncio.CancelledError):
        await long
    late = Completion("first-lost-0", "late", 2, (7,), (-0.5,), 0)
    world.ledger.enter(late)
    await player.play(stream, SIGNAL)
    assert sessions(world.ledger, world) == []


def test_a_session_that_goes_on_is_kept_whole() -> None:
    ledger = Ledger()
    one, other, again = (Completion(name, name, 2, (7,), (-0.5,), 0) for name in ("a", "b", "a"))
    ledger.enter(one)
    ledger.enter(other)
    before = ledger.entered
    ledger.enter(again)
    ledger.forget(before)
    assert (ledger.take("a"), ledger.take("b")) == ([one, again], [])
