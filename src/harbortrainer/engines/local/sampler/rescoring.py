"""The sampler scores some of its own samples again: what rounding alone makes of a log-probability, on this machine.

A token was sampled from a forward pass over one position with a cache, in a batch of many requests. Here the whole
sequence goes through the same weights at once. Both are right; their difference is the noise that the learner's
proof measures with.

A trial asks again and again, each time with all that went before. Its requests are kept as one sequence, so that one
pass scores all of its answers.

Invariant: what is scored again was sampled by the version that scores it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from transformers import PreTrainedModel

from harbortrainer.engines.local.sampler.draw import Draw
from harbortrainer.engines.local.sampler.ledger import Completion

_SHARE = 8
"""One token in so many is scored again, prompts counted too."""
_LEAST_TOKENS, _MOST_TOKENS = 1024, 65536
"""Of the sequences that are scored at a time; one sequence at least."""
_KEPT_TOKENS = 2**20
"""What is remembered at most, the newest."""
_CHUNK = 512
"""Rows of float32 logits alive at once."""


@dataclass(slots=True)
class SampledSequence:
    """All that one version sampled of one conversation, up to now.

    Attributes:
        token_ids: [T] what was given and what was sampled.
        positions: [N] where in it the sampled tokens stand.
        logprobs: [N] nats, as they were sampled.
    """

    session_id: str
    version: int
    temperature: float
    token_ids: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)

    def goes_on_with(self, prompt: Sequence[int], temperature: float, version: int) -> bool:
        """Whether this prompt begins with everything that is here."""
        same = (self.temperature, self.version) == (temperature, version)
        return same and list(prompt[: len(self.token_ids)]) == self.token_ids

    def add(self, prompt: Sequence[int], completion: Completion) -> None:
        """Take in a request that goes on with this sequence."""
        self.token_ids += prompt[len(self.token_ids) :]
        self.positions += range(len(prompt), len(prompt) + len(completion.token_ids))
        self.token_ids += completion.token_ids
        self.logprobs += completion.logprobs


@dataclass(frozen=True, slots=True)
class ScoredAgain:
    """All that one version sampled of one conversation, and what it says of it when it is asked again.

    Attributes:
        token_ids, positions, logprobs: As in `SampledSequence`.
        again: [N] nats.
    """

    version: int
    temperature: float
    token_ids: Sequence[int]
    positions: Sequence[int]
    logprobs: Sequence[float]
    again: Sequence[float]


class RecentSamples:
    """What was sampled last. For one event loop, not for threads."""

    def __init__(self) -> None:
        self._kept: list[SampledSequence] = []
        self._last: dict[str, SampledSequence] = {}
        self._tokens = 0

    def keep(self, prompt: Sequence[int], draw: Draw, completion: Completion) -> None:
        """Remember a request; one that was greedy or truncated says nothing about log-probabilities."""
        if draw.temperature <= 0 or draw.truncates:
            return
        sequence = self._last.get(completion.session_id)
        if sequence is None or not sequence.goes_on_with(prompt, draw.temperature, completion.version):
            sequence = SampledSequence(completion.session_id, completion.version, draw.temperature)
            self._kept.append(sequence)
            self._last[completion.session_id] = sequence
        before = len(sequence.token_ids)
        sequence.add(prompt, completion)
        self._tokens += len(sequence.token_ids) - before
        while self._tokens > _KEPT_TOKENS and len(self._kept) > 1:
            self._forget_oldest()

    def take(self, version: int) -> Sequence[SampledSequence]:
        """Some of what this version sampled, evenly spread over all of it; all of it is forgotten."""
        own = [sequence for sequence in self._kept if sequence.version == version]
        self._kept, self._last, self._tokens = [], {}, 0
        return spread(own)

    def _forget_oldest(self) -> None:
        oldest = self._kept.pop(0)
        self._tokens -= len(oldest.token_ids)
        if self._last.get(oldest.session_id) is oldest:
            del self._last[oldest.session_id]


def spread(sequences: Sequence[SampledSequence]) -> Sequence[SampledSequence]:
    """Every n-th of the sequences, so that they are about a `_SHARE` of the tokens; one at least where there is one."""
    tokens = sum(len(sequence.token_ids) for sequence in sequences)
    budget = min(max(tokens / _SHARE, _LEAST_TOKENS), _MOST_TOKENS)
    return sequences[:: max(1, round(tokens / budget))]


@torch.no_grad()
def score_again(model: PreTrainedModel, chosen: Sequence[SampledSequence]) -> list[ScoredAgain]:
    """One forward pass over each sequence; nothing of the cache is read or written."""
    return [
        ScoredAgain(s.version, s.temperature, s.token_ids, s.positions, s.logprobs, _scored(model, s)) for s in chosen
    ]


def _scored(model: PreTrainedModel, sampled: SampledSequence) -> list[float]:
    ids = torch.tensor(sampled.token_ids, device=model.device)
    positions = torch.tensor(sampled.positions, device=model.device)
    logits = model(input_ids=ids[None], use_cache=False, logits_to_keep=positions - 1).logits[0]
    found: list[float] = []
    for rows, tokens in zip(logits.split(_CHUNK), ids[positions].split(_CHUNK), strict=True):
        logprobs = (rows.float() / sampled.temperature).log_softmax(-1)
        found += logprobs.gather(-1, tokens[:, None])[:, 0].tolist()
    return found
