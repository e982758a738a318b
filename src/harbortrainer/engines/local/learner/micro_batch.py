"""Samples to micro batches: one after the other in a row, without padding, within a budget of tokens.

Only what a trained token needs is computed: a sample ends at its last trained token, log-probabilities are asked for at
trained positions only, and a beginning that samples have in common is computed once where the policy's model allows it.

A sample longer than seq_len loses its tail, as in Prime-RL (`prepare_sample`, src/prime_rl/trainer/batch.py
at commit 559b44772); both the samples and the trained tokens lost are counted.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from enum import Enum
from typing import Self

import torch
from torch import Tensor

from harbortrainer.engines.local.learner.training_sample import (
    Sample,
    cut,
    predicted_tokens,
    require_trainable,
    trained_tokens,
)
from harbortrainer.engines.packed_attention import PackedRow, Stretch

MICRO_BATCH = {"cpu": 2048, "cuda": 16384}
"""Tokens of one forward, or one sequence that alone is longer; on a CPU what its caches hold."""
COPY = 8
"""Tokens whose keys and values are copied take no more memory than one that is computed."""


class Packing(Enum):
    """What may stand in one row."""

    ALONE = "one sequence"
    APART = "several sequences, each whole"
    SHARED = "several sequences, and a beginning that they have in common once"


@dataclass(frozen=True, slots=True)
class TrainedTokens:
    """N trained tokens and what is known about each; all tensors [N], on one device."""

    sample: Tensor
    """Which sample it belongs to, an index into the step's list."""

    position: Tensor
    """Its position in that sample, at least 1."""

    token: Tensor
    """Its id."""

    sampled_logprob: Tensor
    """The engine's log-probability, float32."""

    advantage: Tensor
    """Its advantage, float32."""

    version: Tensor
    """The policy version that sampled it."""

    temperature: Tensor
    """The temperature it was sampled at, float32."""

    ce_weight: Tensor
    """Of a token that was given and is to be predicted: its weight, float32; 0 for one that was sampled."""

    def __len__(self) -> int:
        return self.token.shape[0]

    def where(self, chosen: Tensor) -> "TrainedTokens":
        """The tokens at which `chosen` [N] is true."""
        return TrainedTokens(**{f.name: getattr(self, f.name)[chosen] for f in fields(self)})

    @classmethod
    def joined(cls, parts: Sequence[Self]) -> Self:
        """The tokens of all parts, one after the other; at least one part."""
        return cls(**{f.name: torch.cat([getattr(part, f.name) for part in parts]) for f in fields(cls)})


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """One forward pass: a row of T tokens, and the N tokens asked for."""

    input_ids: Tensor
    """[1, T]."""

    position_ids: Tensor
    """[1, T] each token's position in its sequence."""

    stretches: Sequence[Stretch]
    """Who attends to what."""

    column: Tensor
    """[N] the place in the row that predicts each token."""

    tokens: TrainedTokens


@dataclass(frozen=True, slots=True)
class FittedBatch:
    """The samples of one step after cutting, and what cutting lost."""

    samples: list[Sample]
    cut_samples: int
    cut_tokens: int

    @property
    def trained(self) -> int:
        """N of the loss: the trainable tokens of the whole batch that have an advantage."""
        return trained_tokens(s for s in self.samples if s.advantage != 0.0)

    @property
    def predicted(self) -> int:
        """N of ECHO's loss: the tokens of the whole batch that are to be predicted."""
        return predicted_tokens(self.samples)

    @property
    def metrics(self) -> dict[str, float]:
        """What there is to count before anything is computed."""
        return {
            "samples/trained": float(len(self.samples)),
            "samples/truncated": float(self.cut_samples),
            "tokens/trained": float(self.trained),
            "tokens/predicted": float(self.predicted),
            "tokens/truncated": float(self.cut_tokens),
            "tokens/total": float(sum(len(s) for s in self.samples)),
        }


def fit(samples: Sequence[Sample], seq_len: int) -> FittedBatch:
    """Check every sample and cut it at `seq_len` tokens; one that loses all its trainable tokens is dropped.

    Raises:
        SampleError: A sample breaks the rules of `training_sample.py`.
    """
    for sample in samples:
        require_trainable(sample)
    fitted = [s if len(s) <= seq_len else cut(s, seq_len) for s in samples]
    return FittedBatch(
        samples=[s for s in fitted if any(s.mask)],
        cut_samples=sum(len(s) > seq_len for s in samples),
        cut_tokens=trained_tokens(samples) - trained_tokens(fitted),
    )


def pack(
    samples: Sequence[Sample],
    budget: int,
    device: torch.device,
    *,
    version: int | None = None,
    packing: Packing = Packing.SHARED,
) -> list[MicroBatch]:
    """Micro batches of at most `budget` tokens (or of one sequence that alone is longer).

    Args:
        samples: Checked samples.
        budget: T at most, and less where keys are copied (`COPY`).
        device: Where the tensors go.
        version: Ask only for the tokens that this policy version sampled; None asks for all that train, those that
            are to be predicted among them.
        packing: What the policy's model allows.
    """
    positions = {i: asked for i, sample in enumerate(samples) if (asked := _asked(sample, version))}
    sequences = {i: list(samples[i].token_ids[: asked[-1]]) for i, asked in positions.items()}
    rows: list[tuple[PackedRow, list[int]]] = []
    # Sorted, those that begin alike come one after the other.
    for i in sorted(sequences, key=lambda i: sequences[i]):
        if not rows or packing is Packing.ALONE or not _has_room(rows[-1][0], sequences[i], budget):
            rows.append((PackedRow(packing is Packing.SHARED), []))
        row, members = rows[-1]
        row.add(sequences[i])
        members.append(i)
    return [_micro_batch(samples, row, members, positions, device) for row, members in rows]


def _has_room(row: PackedRow, sequence: list[int], budget: int) -> bool:
    shared = row.shared(sequence)
    return len(row.token_ids) + len(sequence) - shared + (row.copied + shared) / COPY <= budget


def _asked(sample: Sample, version: int | None) -> list[int]:
    pairs = zip(sample.mask, sample.versions, strict=True)
    sampled = [t for t, (trains, v) in enumerate(pairs) if trains and version in (None, v)]
    if version is not None or sample.ce_weights is None:
        return sampled
    return sorted([*sampled, *(t for t, weight in enumerate(sample.ce_weights) if weight)])


def _micro_batch(
    samples: Sequence[Sample],
    row: PackedRow,
    members: list[int],
    positions: dict[int, list[int]],
    device: torch.device,
) -> MicroBatch:
    columns = [places[t - 1] for i, places in zip(members, row.places, strict=True) for t in positions[i]]
    return MicroBatch(
        input_ids=torch.tensor([row.token_ids], device=device),
        position_ids=torch.tensor([row.positions], device=device),
        stretches=row.stretches(device),
        column=torch.tensor(columns, device=device),
        tokens=_tokens(samples, members, positions, device),
    )


def _tokens(
    samples: Sequence[Sample], group: list[int], positions: dict[int, list[int]], device: torch.device
) -> TrainedTokens:
    where = [(i, samples[i], t) for i in group for t in positions[i]]

    def integers(values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.long, device=device)

    def floats(values: list[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float32, device=device)

    return TrainedTokens(
        sample=integers([i for i, _, _ in where]),
        position=integers([t for _, _, t in where]),
        token=integers([s.token_ids[t] for _, s, t in where]),
        sampled_logprob=floats([s.logprobs[t] for _, s, t in where]),
        advantage=floats([s.advantage for _, s, _ in where]),
        version=integers([s.versions[t] for _, s, t in where]),
        temperature=floats([s.temperature for _, s, _ in where]),
        ce_weight=floats([s.ce_weights[t] if s.ce_weights is not None else 0.0 for _, s, t in where]),
    )
