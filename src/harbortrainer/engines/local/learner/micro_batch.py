"""Micro batches: samples packed into rows without padding, up to a number of tokens.

Only what a trained token needs is computed. A sample ends at its last trained token, and log-probabilities are computed
at trained positions only. A prefix that samples share is computed once if the policy's model allows it.

A sample longer than seq_len is truncated, as in Prime-RL (`prepare_sample`, src/prime_rl/trainer/batch.py at commit
559b44772). The truncated samples and the lost trained tokens are counted.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from enum import Enum
from typing import Self

import torch
from torch import Tensor

from harbortrainer.engines.attention.packed import PackedRow, Segment
from harbortrainer.engines.local.learner.training_sample import (
    Sample,
    predicted_tokens,
    require_trainable,
    trained_tokens,
    truncate,
)

MICRO_BATCH = {"cpu": 2048, "cuda": 16384}
"""Tokens of one forward pass, or one longer sequence; on a CPU as many as its caches hold."""
COPIED_PER_COMPUTED = 8
"""This many tokens whose keys and values are copied take at most the memory of one computed token."""


class Packing(Enum):
    """Sequences that one row may hold."""

    ALONE = "one sequence"
    APART = "several sequences, each whole"
    SHARED = "several sequences, and a beginning that they have in common once"


@dataclass(frozen=True, slots=True)
class TrainedTokens:
    """N trained tokens; all tensors [N], on one device."""

    sample: Tensor
    """Index of its sample in the step's list."""

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

    loss_weight: Tensor
    """Weight of a sampled token in the policy loss, float32."""

    ce_weight: Tensor
    """Weight of a prompt token to predict (ECHO), float32; 0 for a sampled token."""

    def __len__(self) -> int:
        return self.token.shape[0]

    def where(self, chosen: Tensor) -> "TrainedTokens":
        """Return the tokens at which `chosen` [N] is true."""
        return TrainedTokens(**{f.name: getattr(self, f.name)[chosen] for f in fields(self)})

    @classmethod
    def joined(cls, parts: Sequence[Self]) -> Self:
        """Concatenate the tokens of at least one part."""
        return cls(**{f.name: torch.cat([getattr(part, f.name) for part in parts]) for f in fields(cls)})


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """One forward pass: a row of T tokens, and the N trained tokens in it."""

    input_ids: Tensor
    """[1, T]."""

    position_ids: Tensor
    """[1, T] each token's position in its sequence."""

    segments: Sequence[Segment]
    """Who attends to what."""

    column: Tensor
    """[N] column of the row that predicts each token."""

    tokens: TrainedTokens


@dataclass(frozen=True, slots=True)
class TruncatedBatch:
    """Samples of one step after truncation, and what truncation removed."""

    samples: list[Sample]
    truncated_samples: int
    truncated_tokens: int

    @property
    def trained(self) -> int:
        """Sampled tokens of the whole batch with an advantage."""
        return trained_tokens(s for s in self.samples if s.advantage != 0.0)

    @property
    def weight(self) -> float:
        """N of the loss: the summed weights of these tokens."""
        return sum(s.loss_weight * trained_tokens([s]) for s in self.samples if s.advantage != 0.0)

    @property
    def predicted(self) -> int:
        """M of ECHO's loss: tokens of the whole batch to predict."""
        return predicted_tokens(self.samples)

    @property
    def metrics(self) -> dict[str, float]:
        """Metrics that are known before the forward pass."""
        return {
            "samples/trained": float(len(self.samples)),
            "samples/truncated": float(self.truncated_samples),
            "tokens/trained": float(self.trained),
            "tokens/predicted": float(self.predicted),
            "tokens/truncated": float(self.truncated_tokens),
            "tokens/total": float(sum(len(s) for s in self.samples)),
        }


def truncate_samples(samples: Sequence[Sample], seq_len: int) -> TruncatedBatch:
    """Check every sample and truncate it to `seq_len` tokens; drop samples without trainable tokens.

    Raises:
        SampleError: A sample breaks the rules of `training_sample.py`.
    """
    for sample in samples:
        require_trainable(sample)
    fitted = [s if len(s) <= seq_len else truncate(s, seq_len) for s in samples]
    return TruncatedBatch(
        samples=[s for s in fitted if any(s.mask)],
        truncated_samples=sum(len(s) > seq_len for s in samples),
        truncated_tokens=trained_tokens(samples) - trained_tokens(fitted),
    )


def pack(
    samples: Sequence[Sample],
    max_tokens: int,
    device: torch.device,
    *,
    version: int | None = None,
    packing: Packing = Packing.SHARED,
) -> list[MicroBatch]:
    """Pack samples into micro batches of at most `max_tokens` tokens, or of one longer sequence.

    Args:
        samples: Checked samples.
        max_tokens: Maximum T; less if keys are copied (`COPIED_PER_COMPUTED`).
        device: Where the tensors go.
        version: Include only tokens that this policy version sampled; None includes all trained tokens, also those
            to predict.
        packing: The packing that the policy's model allows.
    """
    positions = {i: chosen for i, sample in enumerate(samples) if (chosen := _loss_positions(sample, version))}
    sequences = {i: list(samples[i].token_ids[: chosen[-1]]) for i, chosen in positions.items()}
    rows: list[tuple[PackedRow, list[int]]] = []
    # Sorted, so that sequences with a common prefix are neighbours.
    for i in sorted(sequences, key=lambda i: sequences[i]):
        if not rows or packing is Packing.ALONE or not _fits(rows[-1][0], sequences[i], max_tokens):
            rows.append((PackedRow(packing is Packing.SHARED), []))
        row, members = rows[-1]
        row.add(sequences[i])
        members.append(i)
    return [_micro_batch(samples, row, members, positions, device) for row, members in rows]


def _fits(row: PackedRow, sequence: list[int], max_tokens: int) -> bool:
    shared = row.shared(sequence)
    return len(row.token_ids) + len(sequence) - shared + (row.copied + shared) / COPIED_PER_COMPUTED <= max_tokens


def _loss_positions(sample: Sample, version: int | None) -> list[int]:
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
        segments=row.segments(device),
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
        loss_weight=floats([s.loss_weight for _, s, _ in where]),
        ce_weight=floats([s.ce_weights[t] if s.ce_weights is not None else 0.0 for _, s, t in where]),
    )
