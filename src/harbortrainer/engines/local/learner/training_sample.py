"""The training sample: one token sequence for the learner, and its validation.

A sample is one branch of a trial: the tokens from the first prompt to a leaf. The code that builds samples makes a
sampled token that several branches share trainable in one of them only. Invariant of a valid sample: every trainable
token has the log-probability and the policy version with which it was sampled.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate


@dataclass(frozen=True, slots=True)
class Sample:
    """One branch of one trial. All sequences have the same length T.

    `logprobs[t]` is log p(token_ids[t] | token_ids[:t]) of the distribution that was sampled from,
    temperature applied.
    """

    token_ids: Sequence[int]
    """[T] tokens of the branch, prompts and completions."""

    mask: Sequence[bool]
    """[T] true where the token was sampled and is trained on; never at position 0."""

    logprobs: Sequence[float]
    """[T] the engine's log-probability where mask is true; ignored (0 by convention) elsewhere."""

    versions: Sequence[int]
    """[T] the policy version that sampled the token where mask is true; ignored elsewhere."""

    temperature: float
    """The sampling temperature, greater than 0."""

    advantage: float
    """The trial's advantage; the same for each of its branches and tokens."""

    ce_weights: Sequence[float] | None = None
    """[T] weight of the cross-entropy of prompt tokens that the model learns to predict (ECHO), else 0.

    None if there are no such tokens."""

    loss_weight: float = 1.0
    """Weight of each trainable token in the policy loss, greater than 0; the same for each branch of a trial."""

    task_key: str = ""
    """The task, for messages."""

    trial_name: str = ""
    """The trial, for messages."""

    @property
    def where(self) -> str:
        """Task and trial, for messages."""
        return f"task {self.task_key or '?'}, trial {self.trial_name or '?'}"

    def __len__(self) -> int:
        return len(self.token_ids)


class SampleError(ValueError):
    """An invalid sample: a defect of the code that built it, never of the model."""


def require_trainable(sample: Sample) -> None:
    """Raise SampleError if the sample is invalid."""
    problem = _problem(sample)
    if problem:
        raise SampleError(f"{sample.where}: {problem}")


def _problem(sample: Sample) -> str | None:
    lengths = {len(sample.token_ids), len(sample.mask), len(sample.logprobs), len(sample.versions)}
    if len(lengths) != 1:
        return f"token_ids, mask, logprobs and versions differ in length: {sorted(lengths)}"
    if not any(sample.mask):
        return "no trainable token"
    if sample.mask[0]:
        return "the first token is trainable, but it has no context that it could have been sampled from"
    if not (math.isfinite(sample.temperature) and sample.temperature > 0):
        return f"temperature {sample.temperature} is not above 0"
    if not math.isfinite(sample.advantage):
        return f"advantage {sample.advantage}"
    if not (math.isfinite(sample.loss_weight) and sample.loss_weight > 0):
        return f"loss_weight {sample.loss_weight} is not above 0"
    return _bad_logprob(sample) or _bad_weight(sample)


def _bad_logprob(sample: Sample) -> str | None:
    trained = (lp for lp, m in zip(sample.logprobs, sample.mask, strict=True) if m)
    bad = next((lp for lp in trained if not (math.isfinite(lp) and lp <= 1e-4)), None)
    return None if bad is None else f"log-probability {bad} at a trainable token"


def _bad_weight(sample: Sample) -> str | None:
    weights = sample.ce_weights
    if weights is None:
        return None
    if len(weights) != len(sample.mask) or not all(math.isfinite(w) and w >= 0 for w in weights):
        return "ce_weights must have one weight of at least 0 for each token"
    if weights[0] or any(w and m for w, m in zip(weights, sample.mask, strict=True)):
        return "ce_weights is above 0 at a sampled token or at the first token"
    return None


def truncate(sample: Sample, length: int) -> Sample:
    """Return the sample's first `length` tokens, as Prime-RL does at seq_len."""
    weights = None if sample.ce_weights is None else sample.ce_weights[:length]
    return replace(
        sample,
        token_ids=sample.token_ids[:length],
        mask=sample.mask[:length],
        logprobs=sample.logprobs[:length],
        versions=sample.versions[:length],
        ce_weights=weights if weights is not None and any(weights) else None,
    )


def contexts_of(token_ids: Sequence[int]) -> list[int]:
    """Return a number per token [T] that is equal for equal tokens with equal contexts, within this process."""
    return list(accumulate(token_ids, lambda before, token: hash((before, token)), initial=0))[1:]


def trained_tokens(samples: Iterable[Sample]) -> int:
    """Return the number of trainable sampled tokens."""
    return sum(sum(map(bool, s.mask)) for s in samples)


def prune(samples: Iterable[Sample]) -> list[Sample]:
    """Return the samples with a nonzero advantage or with tokens to predict."""
    return [sample for sample in samples if sample.advantage != 0.0 or sample.ce_weights is not None]


def predicted_tokens(samples: Iterable[Sample]) -> int:
    """Return the number of tokens that the model learns to predict."""
    return sum(sum(map(bool, s.ce_weights or ())) for s in samples)
