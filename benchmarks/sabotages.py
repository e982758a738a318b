"""Faults, put into the real sampler and the real loop one at a time: what the proof is there for.

Each sits as deep as such a fault would sit: what the sampler reports, its ledger holds and its own second scoring is
measured against are all wrong together, so that the proof cannot find it by comparing the three.
"""

import copy
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch

from harbortrainer.engines.local import playing
from harbortrainer.engines.local.learner import learner
from harbortrainer.engines.local.rollouts.batch import Batches
from harbortrainer.engines.local.rollouts.group import Group
from harbortrainer.engines.local.sampler import continuous_batching
from harbortrainer.engines.local.sampler.continuous_batching import SeededRunner
from harbortrainer.engines.local.sampler.sampled_model import SampledAdapters
from harbortrainer.engines.local.sampler.sampling_engine import SamplingEngine

DRAW, LOAD, SECOND = continuous_batching.draw, SampledAdapters.load, learner.second_model
COMPUTE = SeededRunner.compute_batch
HAND_OVER, SUBMIT, FINISHED = SamplingEngine.hand_over, SamplingEngine._submit, playing.finished
ADD = Batches.add


def _reporting(change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """The sampler draws as it should and reports other log-probabilities."""

    def draw(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
        tokens, logprobs = DRAW(*arguments)
        return tokens, change(logprobs)

    return patch.object(continuous_batching, "draw", draw)


def strays(share: float = 0.01, by: float = 0.5, seed: int = 0) -> Any:
    generator = torch.Generator().manual_seed(seed)
    return _reporting(lambda lp: lp - by * (torch.rand(lp.shape, generator=generator) < share).to(lp))


def shift(by: float = 0.05) -> Any:
    return _reporting(lambda lp: lp - by)


def temperature(factor: float = 0.9) -> Any:
    """Everything is drawn, and reported, at another temperature than the one that was asked for."""
    return patch.object(
        continuous_batching, "draw", lambda logits, u, t, truncation=None: DRAW(logits, u, t * factor, truncation)
    )


def top_k(k: int = 5) -> Any:
    """Everything is drawn from the k likeliest tokens, and reported under that distribution."""

    def draw(logits: torch.Tensor, u: torch.Tensor, t: torch.Tensor, truncation: Any = None) -> Any:
        return DRAW(logits, u, t, (torch.full_like(t, k), torch.ones_like(t), torch.zeros_like(t)))

    return patch.object(continuous_batching, "draw", draw)


def version(by: int) -> Any:
    """The sampler counts its versions wrong from the first hand-over on."""

    async def hand_over(self: SamplingEngine, load: Callable[[Any], str | None], number: int) -> float:
        return await HAND_OVER(self, load, max(0, number + by))

    return patch.object(SamplingEngine, "hand_over", hand_over)


def newest_for_all() -> Any:
    """A request that goes on over a hand-over is sampled by the newest adapter, and says its own version."""

    def compute_batch(self: SeededRunner, *arguments: Any) -> None:
        turn = self.scheduler.turn
        self.scheduler.turn = replace(turn, adapter=self.scheduler.newest.adapter)
        try:
            COMPUTE(self, *arguments)
        finally:
            self.scheduler.turn = turn

    return patch.object(SeededRunner, "compute_batch", compute_batch)


def never_updated() -> Any:
    return patch.object(SampledAdapters, "load", lambda *arguments: None)


def scaled(by: float = 1.05) -> Any:
    def load(self: SampledAdapters, source: Any, *arguments: Any) -> str:
        return LOAD(self, {name: w * by if "lora_B" in name else w for name, w in source.items()}, *arguments)

    return patch.object(SampledAdapters, "load", load)


def base_noise(by: float = 1e-3, seed: int = 0) -> Any:
    """The sampler's base weights are off by normal noise of this standard deviation; the learner has right ones."""

    def second_model(model: Any) -> Any:
        right, generator = copy.deepcopy(SECOND(model)), torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for weight in model.parameters():
                weight.copy_(weight.float() + by * torch.randn(weight.shape, generator=generator))
        return right

    return patch.object(learner, "second_model", second_model)


def swapped_ids() -> Any:
    """In every answer the first two different neighbours change places; their log-probabilities stay."""

    async def submit(self: SamplingEngine, job: Any, policy: Any) -> Any:
        output = await SUBMIT(self, job, policy)
        ids = list(output.generated_tokens)
        at = next((i for i in range(len(ids) - 2) if ids[i] != ids[i + 1]), None)
        if at is not None:
            ids[at], ids[at + 1] = ids[at + 1], ids[at]
        output.generated_tokens = ids
        return output

    return patch.object(SamplingEngine, "_submit", submit)


def missing_turn(which: str) -> Any:
    """One trial in four comes back without a turn: its "last", or one in the "middle" with what came after it."""

    def finished(rollout: Any, episode: Any, *arguments: Any, **keywords: Any) -> Any:
        for trace in episode.traces:
            turns = [i for i, node in enumerate(trace.nodes) if node.sampled]
            if len(turns) > 1 and int(trace.id, 16) % 4 == 0:
                drop_turn(trace, turns[-1] if which == "last" else turns[-2])
        return FINISHED(rollout, episode, *arguments, **keywords)

    return patch.object(playing, "finished", finished)


def graded(change: Callable[[float], float]) -> Any:
    """Every reward is changed where the loop takes the trial in, after it was put beside its record."""

    def finished(*arguments: Any, **keywords: Any) -> Any:
        rollout = FINISHED(*arguments, **keywords)
        rollout.reward = None if rollout.reward is None else change(rollout.reward)
        return rollout

    return patch.object(playing, "finished", finished)


def permuted() -> Any:
    """Each trial of a group trains with the reward of the next."""

    def add(self: Batches, group: Group, **keywords: Any) -> None:
        rewards = [rollout.reward for rollout in group.rollouts]
        for rollout, reward in zip(group.rollouts, rewards[1:] + rewards[:1], strict=True):
            rollout.reward = reward
        ADD(self, group, **keywords)

    return patch.object(Batches, "add", add)


def drop_turn(trace: Any, at: int) -> None:
    """Take node `at`, and what the agent answered to it, out of a chain of turns."""
    end = next((i for i in range(at + 1, len(trace.nodes)) if trace.nodes[i].sampled), len(trace.nodes))
    gone = range(at, end)
    for node in trace.nodes[end:]:
        node.parent -= len(gone)
    if end < len(trace.nodes):
        trace.nodes[end].parent = trace.nodes[at].parent
    trace.calls = [call for call in trace.calls if call.node not in gone]
    del trace.nodes[at:end]


SABOTAGES: dict[str, Callable[[], Any]] = {
    "shift of 0.05": shift,
    "0.5 on one in 100": strays,
    "version -1": lambda: version(-1),
    "version +1": lambda: version(1),
    "temperature 0.9": temperature,
    "top_k 5": top_k,
    "old by the newest": newest_for_all,
    "never updated": never_updated,
    "scaled by 1.05": scaled,
    "base noise 1e-3": base_noise,
    "swapped ids": swapped_ids,
}
"""What a sampler can do wrong."""
TURNS: dict[str, Callable[[], Any]] = {
    "last turn missing": lambda: missing_turn("last"),
    "middle turn missing": lambda: missing_turn("middle"),
}
"""What is lost between the sampler and the loop; needs trials."""
REWARDS: dict[str, Callable[[], Any]] = {
    "rewards permuted": permuted,
    "rewards flipped": lambda: graded(lambda reward: 1.0 - reward),
    "rewards rescaled": lambda: graded(lambda reward: 2.0 * reward),
}
"""What can befall a reward between its record and the batch; needs trials."""


@contextmanager
def sabotaged(name: str) -> Generator[None]:
    """The process with one fault in it; "none" for none. What was made before is not changed.

    A sampler does not try its model at its start, which sees some of the faults too: the proof is to see them.
    """
    if name == "none":
        yield
        return
    with patch.object(SamplingEngine, "disagreement", _not_tried), (SABOTAGES | TURNS | REWARDS)[name]():
        yield


async def _not_tried(engine: SamplingEngine) -> float:
    del engine
    return 0.0
