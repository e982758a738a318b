"""Samples to micro batches: padded on the right, sorted by length, within a budget of tokens.

Only what a trained token needs is computed: a sample ends at its last trained token, and log-probabilities
are asked for at trained positions only. Padding comes after everything real, so a causal model needs
neither an attention mask nor position ids to get every real position right.

A sample longer than seq_len loses its tail, as in Prime-RL (`prepare_sample`, src/prime_rl/trainer/batch.py
at commit 559b44772); both the samples and the trained tokens lost are counted.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Self

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from harbortrainer.engines.local.learner.training_sample import (
    Sample,
    cut,
    predicted_tokens,
    require_trainable,
    trained_tokens,
)

MICRO_BATCH = {"cpu": 2048, "cuda": 16384}
"""Tokens of one forward, padding included, or one sequence that alone is longer; on a CPU what its caches hold."""


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
    """One forward pass: B sequences padded to T, and the N tokens asked for."""

    input_ids: Tensor
    """[B, T]."""

    row: Tensor
    """[N] the sequence of each token."""

    column: Tensor
    """[N] the position that predicts it, one before its own."""

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
    samples: Sequence[Sample], budget: int, device: torch.device, *, version: int | None = None
) -> list[MicroBatch]:
    """Micro batches of at most `budget` tokens with padding (or of one sequence that alone is longer).

    Args:
        samples: Checked samples.
        budget: B * T at most.
        device: Where the tensors go.
        version: Ask only for the tokens that this policy version sampled; None asks for all that train, those that
            are to be predicted among them.
    """
    positions = {i: _asked(sample, version) for i, sample in enumerate(samples)}
    order = sorted((i for i, asked in positions.items() if asked), key=lambda i: -positions[i][-1])
    groups: list[list[int]] = []
    for i in order:
        longest = positions[groups[-1][0]][-1] if groups else 0
        if groups and longest * (len(groups[-1]) + 1) <= budget:
            groups[-1].append(i)
        else:
            groups.append([i])
    return [_micro_batch(samples, group, positions, device) for group in groups]


def _asked(sample: Sample, version: int | None) -> list[int]:
    pairs = zip(sample.mask, sample.versions, strict=True)
    sampled = [t for t, (trains, v) in enumerate(pairs) if trains and version in (None, v)]
    if version is not None or sample.ce_weights is None:
        return sampled
    return sorted([*sampled, *(t for t, weight in enumerate(sample.ce_weights) if weight)])


def _micro_batch(
    samples: Sequence[Sample], group: list[int], positions: dict[int, list[int]], device: torch.device
) -> MicroBatch:
    sequences = [torch.tensor(samples[i].token_ids[: positions[i][-1]]) for i in group]
    rows = [row for row, i in enumerate(group) for _ in positions[i]]
    tokens = _tokens(samples, group, positions, device)
    return MicroBatch(
        input_ids=pad_sequence(sequences, batch_first=True).to(device),
        row=torch.tensor(rows, device=device),
        column=tokens.position - 1,
        tokens=tokens,
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
