"""Faults that are injected into the real sampler and training loop, one at a time, to test the checks.

Each fault is injected below the sampler's records. So the sampler's replies, its completion log and its rescoring agree
with each other, and comparing them does not reveal the fault.
"""

import copy
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch

from harbortrainer.engines.local import rollout_client
from harbortrainer.engines.local.learner import learner
from harbortrainer.engines.local.learner.training_sample import Sample
from harbortrainer.engines.local.rollouts.batch import Batches, StepBatch
from harbortrainer.engines.local.rollouts.group import Group
from harbortrainer.engines.local.sampler import continuous_batching
from harbortrainer.engines.local.sampler.continuous_batching import SeededRunner
from harbortrainer.engines.local.sampler.sampled_model import SampledAdapters
from harbortrainer.engines.local.sampler.sampling_engine import SamplingEngine

DRAW, LOAD, SECOND = continuous_batching.sample_tokens, SampledAdapters.load, learner.share_weights
COMPUTE = SeededRunner.compute_batch
HAND_OVER, SUBMIT, FINISHED = SamplingEngine.update_weights, SamplingEngine._submit, rollout_client.fill_rollout
ADD, CUT, SAMPLES = Batches.add, Batches.cut, Group.samples


def _reporting(change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """The sampler draws correctly but reports changed log-probabilities."""

    def draw(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
        tokens, logprobs = DRAW(*arguments)
        return tokens, change(logprobs)

    return patch.object(continuous_batching, "sample_tokens", draw)


def strays(share: float = 0.01, by: float = 0.5, seed: int = 0) -> Any:
    generator = torch.Generator().manual_seed(seed)
    return _reporting(lambda lp: lp - by * (torch.rand(lp.shape, generator=generator) < share).to(lp))


def shift(by: float = 0.05) -> Any:
    return _reporting(lambda lp: lp - by)


def temperature(factor: float = 0.9) -> Any:
    """Tokens are drawn and reported at another temperature than the requested one."""
    return patch.object(
        continuous_batching,
        "sample_tokens",
        lambda logits, u, t, truncation=None: DRAW(logits, u, t * factor, truncation),
    )


def top_k(k: int = 5) -> Any:
    """Tokens are drawn from the k likeliest ones, and reported under that distribution."""

    def draw(logits: torch.Tensor, u: torch.Tensor, t: torch.Tensor, truncation: Any = None) -> Any:
        return DRAW(logits, u, t, (torch.full_like(t, k), torch.ones_like(t), torch.zeros_like(t)))

    return patch.object(continuous_batching, "sample_tokens", draw)


def version(by: int) -> Any:
    """The sampler's version number is wrong from the first weight update on."""

    async def update_weights(self: SamplingEngine, load: Callable[[Any], str | None], number: int) -> float:
        return await HAND_OVER(self, load, max(0, number + by))

    return patch.object(SamplingEngine, "update_weights", update_weights)


def newest_for_all() -> Any:
    """A request that runs during a weight update is sampled by the newest adapter, but reports its old version."""

    def compute_batch(self: SeededRunner, *arguments: Any) -> None:
        policy = self.scheduler.active_policy
        self.scheduler.active_policy = replace(policy, adapter=self.scheduler.newest.adapter)
        try:
            COMPUTE(self, *arguments)
        finally:
            self.scheduler.active_policy = policy

    return patch.object(SeededRunner, "compute_batch", compute_batch)


def never_updated() -> Any:
    return patch.object(SampledAdapters, "load", lambda *arguments: None)


def scaled(by: float = 1.05) -> Any:
    def load(self: SampledAdapters, source: Any, *arguments: Any) -> str:
        return LOAD(self, {name: w * by if "lora_B" in name else w for name, w in source.items()}, *arguments)

    return patch.object(SampledAdapters, "load", load)


def base_noise(by: float = 1e-3, seed: int = 0) -> Any:
    """The sampler's base weights have normal noise of this standard deviation; the learner's are correct."""

    def share_weights(model: Any) -> Any:
        right, generator = copy.deepcopy(SECOND(model)), torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for weight in model.parameters():
                noise = torch.randn(weight.shape, generator=generator).to(weight.device)
                weight.copy_(weight.float() + by * noise)
        return right

    return patch.object(learner, "share_weights", share_weights)


def swapped_ids() -> Any:
    """The first two different neighbouring tokens of every answer are swapped, but not their log-probabilities."""

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
    """One trial in four lacks a turn: the "last", or a "middle" one with the observation after it."""

    def fill_rollout(rollout: Any, episode: Any, *arguments: Any, **keywords: Any) -> Any:
        for trace in episode.traces:
            turns = [i for i, node in enumerate(trace.nodes) if node.sampled]
            if len(turns) > 1 and int(trace.id, 16) % 4 == 0:
                drop_turn(trace, turns[-1] if which == "last" else turns[-2])
        return FINISHED(rollout, episode, *arguments, **keywords)

    return patch.object(rollout_client, "fill_rollout", fill_rollout)


def graded(change: Callable[[float], float]) -> Any:
    """Every reward is changed when the loop receives the trial, after it was compared with its record."""

    def fill_rollout(*arguments: Any, **keywords: Any) -> Any:
        rollout = FINISHED(*arguments, **keywords)
        rollout.reward = None if rollout.reward is None else change(rollout.reward)
        return rollout

    return patch.object(rollout_client, "fill_rollout", fill_rollout)


def permuted() -> Any:
    """Each trial of a group gets the reward of the next one."""

    def add(self: Batches, group: Group, **keywords: Any) -> None:
        rewards = [rollout.reward for rollout in group.rollouts]
        for rollout, reward in zip(group.rollouts, rewards[1:] + rewards[:1], strict=True):
            rollout.reward = reward
        ADD(self, group, **keywords)

    return patch.object(Batches, "add", add)


def exchanged() -> Any:
    """A group gets a rollout of the last group of another task, with its record, reward and samples."""
    before: list[Group] = []

    def add(self: Batches, group: Group, **keywords: Any) -> None:
        if other := next((it for it in reversed(before) if it.plan != group.plan), None):
            group.rollouts[0] = other.rollouts[0]
        before.append(group)
        ADD(self, group, **keywords)

    return patch.object(Batches, "add", add)


def changed_samples(change: Callable[[list[Sample]], list[Sample]]) -> Any:
    """The samples of each trial are changed after they were made from its trace."""

    def samples(self: Group) -> list[Sample]:
        return change(SAMPLES(self))

    return patch.object(Group, "samples", samples)


def trained_again() -> Any:
    """The groups of a batch train in the next batch again."""
    before: list[Group] = []

    def cut(self: Batches, step: int) -> StepBatch:
        batch = CUT(self, step)
        again, before[:] = list(before), batch.groups
        return replace(
            batch, groups=batch.groups + again, samples=batch.samples + [s for it in again for s in it.samples()]
        )

    return patch.object(Batches, "cut", cut)


def with_tokens_of_next(samples: list[Sample]) -> list[Sample]:
    """Each sample has the tokens, masks and log-probabilities of the next one."""
    names = ("token_ids", "mask", "logprobs", "versions", "ce_weights")
    return [
        replace(sample, **{name: getattr(other, name) for name in names})
        for sample, other in zip(samples, samples[1:] + samples[:1], strict=True)
    ]


def without_first_token(samples: list[Sample]) -> list[Sample]:
    """The first token of each sample's answers does not train."""
    return [_masked(sample, lambda mask, at: not mask[at - 1]) for sample in samples]


def without_last_token(samples: list[Sample]) -> list[Sample]:
    """The last token of each sample's answers, its stop token, does not train."""
    return [_masked(sample, lambda mask, at: at + 1 == len(mask) or not mask[at + 1]) for sample in samples]


def with_prompt_token(samples: list[Sample]) -> list[Sample]:
    """The last prompt token of each sample trains too."""
    return [
        replace(s, mask=[own or s.mask[at + 1 : at + 2] == [True] for at, own in enumerate(s.mask)]) for s in samples
    ]


def _masked(sample: Sample, drops: Callable[[Sequence[bool], int], bool]) -> Sample:
    mask = [own and not drops(sample.mask, at) for at, own in enumerate(sample.mask)]
    return replace(sample, mask=mask)


def cut_at_the_end(samples: list[Sample]) -> list[Sample]:
    """Each sample lacks its last token."""
    names = ("token_ids", "mask", "logprobs", "versions")
    return [replace(sample, **{name: getattr(sample, name)[:-1] for name in names}) for sample in samples]


def drop_turn(trace: Any, at: int) -> None:
    """Remove node `at`, and the observation after it, from a chain of turns."""
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
"""Faults of the sampler."""
TURNS: dict[str, Callable[[], Any]] = {
    "last turn missing": lambda: missing_turn("last"),
    "middle turn missing": lambda: missing_turn("middle"),
}
"""Turns that are lost between the sampler and the loop; needs trials."""
REWARDS: dict[str, Callable[[], Any]] = {
    "rewards permuted": permuted,
    "rewards flipped": lambda: graded(lambda reward: 1.0 - reward),
    "rewards rescaled": lambda: graded(lambda reward: 2.0 * reward),
}
"""Rewards that change between the record and the batch; needs trials."""
SAMPLES_OF_TRIALS: dict[str, Callable[[], Any]] = {
    "rollout exchanged": exchanged,
    "samples trained twice": lambda: changed_samples(lambda samples: [*samples, *samples[:1]]),
    "groups trained again": trained_again,
    "tokens of another trial": lambda: changed_samples(with_tokens_of_next),
    "first token untrained": lambda: changed_samples(without_first_token),
    "last token untrained": lambda: changed_samples(without_last_token),
    "last token cut off": lambda: changed_samples(cut_at_the_end),
    "prompt token trained": lambda: changed_samples(with_prompt_token),
}
"""Trials and samples that are mixed up between the trace and the learner; needs trials."""


@contextmanager
def sabotaged(name: str) -> Generator[None]:
    """Inject one fault while the block runs; "none" injects none. Objects created before are not changed.

    The sampler's self-check at its start is off. It would find some of the faults before the check under test does.
    """
    if name == "none":
        yield
        return
    with (
        patch.object(SamplingEngine, "self_check", _skip_self_check),
        (SABOTAGES | TURNS | REWARDS | SAMPLES_OF_TRIALS)[name](),
    ):
        yield


async def _skip_self_check(engine: SamplingEngine) -> float:
    del engine
    return 0.0
