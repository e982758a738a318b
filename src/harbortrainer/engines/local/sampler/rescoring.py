"""The sampler scores some of its own samples again: what rounding alone makes of a log-probability, on this machine.

A token was sampled from a forward pass over one position with a cache, in a batch of many requests. Here the whole
sequence goes through the same weights at once. Both are right; their difference is the noise that the learner's
proof measures with.

A trial asks again and again, each time with all that went before. Its requests are kept as one sequence, so that one
pass scores all of its answers.

Invariant: what is scored again was sampled by the version that scores it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, islice

import torch
from transformers import PreTrainedModel

from harbortrainer.engines.local.sampler.draw import Draw
from harbortrainer.engines.local.sampler.ledger import Completion
from harbortrainer.engines.ragged_plan import whole_sequences

_SHARE = 8
"""One token in so many is scored again, prompts counted too."""
_LEAST_TOKENS, _MOST_TOKENS = 1024, 65536
"""Of the sequences that are scored at a time; one sequence at least."""
_KEPT_TOKENS = 2**20
"""What is remembered at most, the newest."""
_PASS_TOKENS = 1024
"""Of one forward pass, or one sequence that alone is longer."""
_CHUNK = 512
"""Rows of float32 logits alive at once."""
_MOST_LOGITS = 2**28
"""Logits of one forward pass, in the model's dtype: of a sequence that would have more, every n-th token is scored."""


@dataclass(slots=True)
class SampledSequence:
    """All that one version sampled of one conversation, up to now.

    Attributes:
        token_ids: [T] what was given and what was sampled.
        positions: [N] where in it the sampled tokens stand.
        logprobs: [N] nats, as they were sampled.
        overtaken: Whether a hand-over came while one of its requests ran.
    """

    session_id: str
    version: int
    temperature: float
    token_ids: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    overtaken: bool = False

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
        self.overtaken |= completion.overtaken

    def thinned(self, most: int) -> "SampledSequence":
        """With every n-th of its sampled tokens, so that they are `most` or fewer."""
        step = -(-len(self.positions) // most)
        if step <= 1:
            return self
        return replace(self, positions=self.positions[::step], logprobs=self.logprobs[::step])


@dataclass(frozen=True, slots=True)
class ScoredAgain:
    """All that one version sampled of one conversation, and what it says of it when it is asked again.

    Attributes:
        token_ids, positions, logprobs, overtaken: As in `SampledSequence`.
        again: [N] nats.
    """

    version: int
    temperature: float
    token_ids: Sequence[int]
    positions: Sequence[int]
    logprobs: Sequence[float]
    again: Sequence[float]
    overtaken: bool = False


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
        """Some of what this version sampled, evenly spread over all of it; it and what is older is forgotten."""
        own = [sequence for sequence in self._kept if sequence.version == version]
        self._kept = [sequence for sequence in self._kept if sequence.version > version]
        self._last = {s.session_id: s for s in self._kept if self._last.get(s.session_id) is s}
        self._tokens = sum(len(sequence.token_ids) for sequence in self._kept)
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
    """Whole sequences, some in one forward pass; nothing of the cache is read or written."""
    most = _MOST_LOGITS // model.config.get_text_config().vocab_size
    return [scored for together in _passes(chosen) for scored in _scored(model, [s.thinned(most) for s in together])]


def _passes(chosen: Sequence[SampledSequence]) -> list[list[SampledSequence]]:
    passes: list[list[SampledSequence]] = []
    tokens = 0
    for sequence in chosen:
        tokens += len(sequence.token_ids)
        if not passes or tokens > _PASS_TOKENS:
            passes.append([])
            tokens = len(sequence.token_ids)
        passes[-1].append(sequence)
    return passes


def _scored(model: PreTrainedModel, together: Sequence[SampledSequence]) -> list[ScoredAgain]:
    """One forward pass over sequences that stand one after the other."""
    lengths = [len(s.token_ids) for s in together]
    begins = [0, *accumulate(lengths)][:-1]
    ids, positions, sampled, temperatures = (
        torch.tensor(numbers, device=model.device)
        for numbers in (
            [token for s in together for token in s.token_ids],
            [at for length in lengths for at in range(length)],
            [begin + at for begin, s in zip(begins, together, strict=True) for at in s.positions],
            [s.temperature for s in together for _ in s.positions],
        )
    )
    logits = model(
        input_ids=ids[None],
        position_ids=positions[None],
        use_cache=False,
        logits_to_keep=sampled - 1,
        ragged_plan=whole_sequences(lengths),
    ).logits[0]
    again = iter(_logprobs(logits, ids[sampled], temperatures))
    return [
        ScoredAgain(
            s.version,
            s.temperature,
            s.token_ids,
            s.positions,
            s.logprobs,
            list(islice(again, len(s.positions))),
            s.overtaken,
        )
        for s in together
    ]


def _logprobs(logits: torch.Tensor, tokens: torch.Tensor, temperatures: torch.Tensor) -> list[float]:
    """[N] nats of these tokens; `logits` is [N, V]."""
    found: list[float] = []
    for rows, chosen, divisors in zip(*(t.split(_CHUNK) for t in (logits, tokens, temperatures)), strict=True):
        logprobs = (rows.float() / divisors[:, None]).log_softmax(-1)
        found += logprobs.gather(-1, chosen[:, None])[:, 0].tolist()
    return found
