"""Rescores some of the sampler's own samples, to measure the effect of rounding on log-probabilities.

A token was sampled in a forward pass over one position, with a cache and many other requests. Rescoring runs the whole
sequence through the same weights in one pass. Both results are correct; the learner's log-probability check uses their
difference as its noise level.

Each request of a trial extends the previous one. They are kept as one sequence, so one pass rescores all its turns.
What sequences have in common at their beginning, such as the prompt of a group, is computed once.

Invariant: a sequence is rescored by the policy version that sampled it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import islice

import torch
from transformers import PreTrainedModel

from harbortrainer.engines.attention.packed import PackedRow
from harbortrainer.engines.attention.paged import RAGGED_ATTENTION
from harbortrainer.engines.local.sampler.completion_log import Completion
from harbortrainer.engines.local.sampler.sampling_params import LOGITS_AT_ONCE, SamplingParams

_SHARE = 8
"""One token in this many is rescored, prompts included."""
_MIN_TOKENS, _MAX_TOKENS = 1024, 65536
"""Tokens rescored per call; at least one sequence."""
_MAX_KEPT_TOKENS = 2**20
"""Tokens of recent samples to keep; the oldest are evicted."""
_PASS_TOKENS = 1024
"""Tokens of one forward pass. A longer sequence gets a pass of its own."""
_MAX_LOGITS = 2**28
"""Logits of one forward pass, in the model's dtype. A sequence with more has only every n-th token rescored."""


@dataclass(slots=True)
class SampledSequence:
    """The part of one conversation that one policy version sampled so far.

    Attributes:
        token_ids: [T] prompt and sampled tokens.
        positions: [N] indices of the sampled tokens in `token_ids`.
        logprobs: [N] nats, recorded at sampling.
        crossed_update: Whether a weight update came while one of its requests ran.
    """

    session_id: str
    version: int
    temperature: float
    token_ids: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    crossed_update: bool = False

    def is_extended_by(self, prompt: Sequence[int], temperature: float, version: int) -> bool:
        """Whether a request extends this sequence: same settings, and its prompt starts with all these tokens."""
        same = (self.temperature, self.version) == (temperature, version)
        return same and list(prompt[: len(self.token_ids)]) == self.token_ids

    def add(self, prompt: Sequence[int], completion: Completion) -> None:
        """Append a request that extends this sequence."""
        self.token_ids += prompt[len(self.token_ids) :]
        self.positions += range(len(prompt), len(prompt) + len(completion.token_ids))
        self.token_ids += completion.token_ids
        self.logprobs += completion.logprobs
        self.crossed_update |= completion.crossed_update

    def subsample(self, limit: int) -> "SampledSequence":
        """Return a copy with every n-th sampled token, so that at most `limit` remain."""
        step = -(-len(self.positions) // limit)
        if step <= 1:
            return self
        return replace(self, positions=self.positions[::step], logprobs=self.logprobs[::step])


@dataclass(frozen=True, slots=True)
class Rescored:
    """A sampled sequence with recorded and recomputed log-probabilities of the same policy version.

    Attributes:
        token_ids, positions, logprobs, crossed_update: As in `SampledSequence`.
        recomputed: [N] nats, from one forward pass over the whole sequence.
    """

    version: int
    temperature: float
    token_ids: Sequence[int]
    positions: Sequence[int]
    logprobs: Sequence[float]
    recomputed: Sequence[float]
    crossed_update: bool = False


class RecentSamples:
    """The most recent samples, as candidates for rescoring. Not thread-safe: use it on one event loop."""

    def __init__(self) -> None:
        self._sequences: list[SampledSequence] = []
        self._last: dict[str, SampledSequence] = {}
        self._tokens = 0

    def add(self, prompt: Sequence[int], params: SamplingParams, completion: Completion) -> None:
        """Add a request, unless it was greedy or truncated: those have other log-probabilities than a plain pass."""
        if params.temperature <= 0 or params.truncates:
            return
        sequence = self._last.get(completion.session_id)
        if sequence is None or not sequence.is_extended_by(prompt, params.temperature, completion.version):
            sequence = SampledSequence(completion.session_id, completion.version, params.temperature)
            self._sequences.append(sequence)
            self._last[completion.session_id] = sequence
        before = len(sequence.token_ids)
        sequence.add(prompt, completion)
        self._tokens += len(sequence.token_ids) - before
        while self._tokens > _MAX_KEPT_TOKENS and len(self._sequences) > 1:
            self._evict_oldest()

    def pop(self, version: int) -> Sequence[SampledSequence]:
        """Return an even selection of this version's sequences, and remove all of this version and older ones."""
        own = [sequence for sequence in self._sequences if sequence.version == version]
        self._sequences = [sequence for sequence in self._sequences if sequence.version > version]
        self._last = {s.session_id: s for s in self._sequences if self._last.get(s.session_id) is s}
        self._tokens = sum(len(sequence.token_ids) for sequence in self._sequences)
        return select_evenly(own)

    def _evict_oldest(self) -> None:
        oldest = self._sequences.pop(0)
        self._tokens -= len(oldest.token_ids)
        if self._last.get(oldest.session_id) is oldest:
            del self._last[oldest.session_id]


def select_evenly(sequences: Sequence[SampledSequence]) -> Sequence[SampledSequence]:
    """Return every n-th sequence, so that they hold about 1/`_SHARE` of the tokens; at least one if there is any."""
    tokens = sum(len(sequence.token_ids) for sequence in sequences)
    budget = min(max(tokens / _SHARE, _MIN_TOKENS), _MAX_TOKENS)
    return sequences[:: max(1, round(tokens / budget))]


@torch.no_grad()
def rescore(model: PreTrainedModel, chosen: Sequence[SampledSequence], *, one_by_one: bool = False) -> list[Rescored]:
    """Rescore whole sequences; the cache is neither read nor written.

    Args:
        model: The sampled model.
        chosen: The sequences.
        one_by_one: Whether each gets a forward pass of its own, because the model would mix sequences in one row.
    """
    limit = _MAX_LOGITS // model.config.get_text_config().vocab_size
    rows = [([sequence], None) for sequence in chosen] if one_by_one else _pack(chosen, _can_share(model))
    kept = [([sequence.subsample(limit) for sequence in batch], row) for batch, row in rows]
    return [scored for batch, row in kept for scored in _score_row(model, batch, row)]


def _can_share(model: PreTrainedModel) -> bool:
    """Whether its attention can compute a common prefix once; transformers' own keeps sequences of a row apart only."""
    return model.config.get_text_config()._attn_implementation == RAGGED_ATTENTION


def _pack(chosen: Sequence[SampledSequence], sharing: bool) -> list[tuple[list[SampledSequence], PackedRow]]:
    """Pack sequences into rows of at most `_PASS_TOKENS` tokens, or of one longer sequence."""
    rows: list[tuple[list[SampledSequence], PackedRow]] = []
    for sequence in sorted(chosen, key=lambda s: s.token_ids):  # so that those with a common prefix are neighbours
        tokens = sequence.token_ids
        if not rows or len(rows[-1][1].token_ids) + len(tokens) - rows[-1][1].shared(tokens) > _PASS_TOKENS:
            rows.append(([], PackedRow(sharing)))
        rows[-1][0].append(sequence)
        rows[-1][1].add(tokens)
    return rows


def _score_row(model: PreTrainedModel, batch: Sequence[SampledSequence], row: PackedRow | None) -> list[Rescored]:
    """Rescore the sequences of a row in one forward pass; without a row, one sequence."""
    tokens = [sequence.token_ids[position] for sequence in batch for position in sequence.positions]
    temperatures = [sequence.temperature for sequence in batch for _ in sequence.positions]
    ids, columns, packed = batch[0].token_ids, [position - 1 for position in batch[0].positions], {}
    if row is not None:
        ids, positions = row.token_ids, torch.tensor([row.positions], device=model.device)
        columns = [
            places[position - 1]
            for sequence, places in zip(batch, row.places, strict=True)
            for position in sequence.positions
        ]
        packed = {"position_ids": positions, "segments": row.segments(model.device)}
    row_ids, chosen, wanted, divisors = (
        torch.tensor(numbers, device=model.device) for numbers in ([ids], tokens, columns, temperatures)
    )
    kept, rows = wanted.unique(return_inverse=True)  # equal answers share their columns
    logits = model(input_ids=row_ids, use_cache=False, logits_to_keep=kept, **packed).logits[0]
    recomputed = iter(_logprobs(logits, rows, chosen, divisors))
    return [
        Rescored(
            s.version,
            s.temperature,
            s.token_ids,
            s.positions,
            s.logprobs,
            list(islice(recomputed, len(s.positions))),
            s.crossed_update,
        )
        for s in batch
    ]


def _logprobs(
    logits: torch.Tensor, rows: torch.Tensor, tokens: torch.Tensor, temperatures: torch.Tensor
) -> list[float]:
    """Return the log-probabilities (nats) of `tokens` [N] under the `rows` [N] of `logits` [C, V]."""
    chunk = max(1, LOGITS_AT_ONCE[logits.device.type] // logits.shape[-1])
    found = [
        (logits[at].float() / divisors[:, None]).log_softmax(-1).gather(-1, chosen[:, None])[:, 0]
        for at, chosen, divisors in zip(*(t.split(chunk) for t in (rows, tokens, temperatures)), strict=True)
    ]
    return torch.cat(found).tolist()
