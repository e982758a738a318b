"""Samples to micro batches: padded on the right, sorted by length, within a budget of tokens.

Only what a trained token needs is computed: a sample ends at its last trained token, and log-probabilities
are asked for at trained positions only. Padding comes after everything real, so a causal model needs
neither an attention mask nor position ids to get every real position right.

A sample longer than seq_len loses its tail, as in Prime-RL (`prepare_sample`, src/prime_rl/trainer/batch.py
at commit 559b44772); both the samples and the trained tokens lost are counted.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from harbortrainer.engines.local.learner.sample import Sample, check, cut, trained_tokens


@dataclass(frozen=True, slots=True)
class Tokens:
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

    def __len__(self) -> int:
        return self.token.shape[0]

    def where(self, chosen: Tensor) -> "Tokens":
        """The tokens at which `chosen` [N] is true."""
        return Tokens(**{f.name: getattr(self, f.name)[chosen] for f in fields(self)})


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """One forward pass: B sequences padded to T, and the N tokens asked for."""

    input_ids: Tensor
    """[B, T]."""

    row: Tensor
    """[N] the sequence of each token."""

    column: Tensor
    """[N] the position that predicts it, one before its own."""

    tokens: Tokens


@dataclass(frozen=True, slots=True)
class Batch:
    """The samples of one step after cutting, and what cutting lost."""

    samples: list[Sample]
    cut_samples: int
    cut_tokens: int

    @property
    def trained(self) -> int:
        """N of the loss: the trainable tokens of the whole batch."""
        return trained_tokens(self.samples)

    @property
    def metrics(self) -> dict[str, float]:
        """What there is to count before anything is computed."""
        return {
            "samples/trained": float(len(self.samples)),
            "samples/truncated": float(self.cut_samples),
            "tokens/trained": float(self.trained),
            "tokens/truncated": float(self.cut_tokens),
            "tokens/total": float(sum(len(s) for s in self.samples)),
        }


def fit(samples: Sequence[Sample], seq_len: int) -> Batch:
    """Check every sample and cut it at `seq_len` tokens; one that loses all its trainable tokens is dropped.

    Raises:
        SampleError: A sample breaks the rules of `sample.py`.
    """
    for sample in samples:
        check(sample)
    fitted = [s if len(s) <= seq_len else cut(s, seq_len) for s in samples]
    return Batch(
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
        version: Ask only for the tokens that this policy version sampled; None asks for all trained tokens.
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
    return [t for t, (trains, v) in enumerate(pairs) if trains and version in (None, v)]


def _micro_batch(
    samples: Sequence[Sample], group: list[int], positions: dict[int, list[int]], device: torch.device
) -> MicroBatch:
    width = positions[group[0]][-1]
    input_ids = torch.zeros(len(group), width, dtype=torch.long)
    for row, i in enumerate(group):
        end = positions[i][-1]
        input_ids[row, :end] = torch.tensor(samples[i].token_ids[:end])
    rows = [row for row, i in enumerate(group) for _ in positions[i]]
    tokens = _tokens(samples, group, positions, device)
    return MicroBatch(
        input_ids=input_ids.to(device),
        row=torch.tensor(rows, device=device),
        column=tokens.position - 1,
        tokens=tokens,
    )


def _tokens(
    samples: Sequence[Sample], group: list[int], positions: dict[int, list[int]], device: torch.device
) -> Tokens:
    where = [(i, samples[i], t) for i in group for t in positions[i]]

    def integers(values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.long, device=device)

    def floats(values: list[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float32, device=device)

    return Tokens(
        sample=integers([i for i, _, _ in where]),
        position=integers([t for _, _, t in where]),
        token=integers([s.token_ids[t] for _, s, t in where]),
        sampled_logprob=floats([s.logprobs[t] for _, s, t in where]),
        advantage=floats([s.advantage for _, s, _ in where]),
        version=integers([s.versions[t] for _, s, t in where]),
        temperature=floats([s.temperature for _, s, _ in where]),
    )
