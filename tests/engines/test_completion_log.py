"""The completion log: turns are matched with completions, and completions of failed attempts are evicted."""

import asyncio
import struct
from typing import cast

import pytest
from scripted_run import SEQ_LEN, FakeComponents
from verifiers.v1.episode import WireEpisode

from harbortrainer.engines.local.rollout_client import RolloutClient, TaskStream
from harbortrainer.engines.local.sampler.completion_log import Completion, CompletionLog, match_completions
from harbortrainer.errors import ProofError

SIGNAL, LOST = 0, 2


class RetriedTrials(FakeComponents):
    """Each trial is a second attempt; the session of the first attempt is in no episode."""

    def __init__(self) -> None:
        super().__init__()
        self.gates: dict[int, asyncio.Event] = {}

    async def run(self, index: int, *, seed: int | None = None) -> WireEpisode:
        first = f"first-{self.tasks[index].name}-{self.started[index]}"
        self.completion_log.add(Completion(first, first, 2, (7,), (-0.5,), 0))
        if index in self.gates:
            await self.gates[index].wait()
        return await super().run(index, seed=seed)

    def client(self) -> tuple[RolloutClient, TaskStream]:
        return RolloutClient(self.completion_log, seq_len=SEQ_LEN, max_inflight=None), cast("TaskStream", self)


def first_attempts_in(completion_log: CompletionLog, fake: FakeComponents) -> list[str]:
    """Return the sessions of first attempts that the log still has."""
    names = [f"first-{task.name}-{number}" for task in fake.tasks for number in range(9)]
    return [name for name in names if completion_log.peek(name)]


async def test_evicts_completions_of_failed_attempts_when_idle() -> None:
    fake = RetriedTrials()
    client, stream = fake.client()
    for _ in range(3):
        await client.run_rollout(stream, SIGNAL)
        assert first_attempts_in(fake.completion_log, fake) == []
    assert fake.completion_log.discarded_tokens == 3, "one of each first attempt, none of the trials"


async def test_keeps_completions_since_start_of_rollout_in_flight() -> None:
    fake = RetriedTrials()
    client, stream = fake.client()
    fake.gates[LOST] = asyncio.Event()
    await client.run_rollout(stream, SIGNAL)
    slow = asyncio.create_task(client.run_rollout(stream, LOST))
    await asyncio.sleep(0)
    await client.run_rollout(stream, SIGNAL)
    assert first_attempts_in(fake.completion_log, fake) == ["first-signal-1", "first-lost-0"]
    fake.gates[LOST].set()
    assert (await slow).task == "lost"
    assert first_attempts_in(fake.completion_log, fake) == []


async def test_evicts_completions_of_cancelled_rollout() -> None:
    fake = RetriedTrials()
    client, stream = fake.client()
    fake.gates[LOST] = asyncio.Event()
    slow = asyncio.create_task(client.run_rollout(stream, LOST))
    await asyncio.sleep(0)
    slow.cancel()
    with pytest.raises(asyncio.CancelledError):
        await slow
    late = Completion("first-lost-0", "late", 2, (7,), (-0.5,), 0)
    fake.completion_log.add(late)
    await client.run_rollout(stream, SIGNAL)
    assert first_attempts_in(fake.completion_log, fake) == []


def test_keeps_continued_session_whole() -> None:
    completion_log = CompletionLog()
    first, other, later = (Completion(name, name, 2, (7,), (-0.5,), 0) for name in ("a", "b", "a"))
    completion_log.add(first)
    completion_log.add(other)
    before = completion_log.total
    completion_log.add(later)
    completion_log.evict(before)
    assert (completion_log.pop("a"), completion_log.pop("b")) == ([first, later], [])


COMPLETIONS = [
    Completion("s", "1", 4, (1, 2), (-0.5, -0.25), version=0),
    Completion("s", "2", 4, (3,), (-1.0,), version=0),
    Completion("s", "3", 4, (1, 2), (-0.75, -0.125), version=1),
]


def test_matches_turns_with_equal_answers():
    turns = [([1, 2], [-0.75, -0.125]), ([1, 2], [-0.5, -0.25])]
    assert [c.version for c in match_completions(turns, COMPLETIONS)] == [1, 0]


def test_matches_logprobs_in_float32():
    """verifiers 0.4.1 keeps log-probabilities as float32."""
    logprob = -31.415926535897931
    completion = Completion("t", "r", 2, (7,), (logprob,), 0)
    (rounded,) = struct.unpack("f", struct.pack("f", logprob))
    assert match_completions([([7], [rounded])], [completion]) == [completion]
    with pytest.raises(ProofError, match="log-probabilities"):
        match_completions([([7], [logprob + 1e-5])], [completion])


@pytest.mark.parametrize(
    ("turns", "message"),
    [
        ([([1, 3], [-0.5, -0.25])], "tokens of sampled turn 0"),
        ([([1], [-0.5])], "tokens of sampled turn 0"),
        ([([3], [-1.0]), ([3], [-1.0])], "tokens of sampled turn 1"),
        ([([3], [-1.1])], "log-probabilities of sampled turn 0"),
    ],
)
def test_refuses_turn_that_was_not_sampled(turns, message):
    with pytest.raises(ProofError, match=f"task a, trial b: the {message}"):
        match_completions(turns, COMPLETIONS, where="task a, trial b")
