"""One step's arithmetic: forward and backward of micro batches, and every token again under its own version."""

from collections.abc import Sequence

import torch

from harbortrainer.engines.local.learner.batch import MicroBatch, pack
from harbortrainer.engines.local.learner.history import History
from harbortrainer.engines.local.learner.loss import policy_loss
from harbortrainer.engines.local.learner.metrics import Seen
from harbortrainer.engines.local.learner.policy import Policy
from harbortrainer.engines.local.learner.proof import ProofError, Recomputed
from harbortrainer.engines.local.learner.sample import Sample
from harbortrainer.engines.local.learner.settings import LossSettings


def forward_backward(policy: Policy, micro_batch: MicroBatch, loss: LossSettings, *, scale: int) -> Seen:
    """Add the gradient of one micro batch to the policy's; `scale` is the whole batch's count of trained tokens."""
    tokens = micro_batch.tokens
    logprobs, entropy = policy.logprobs(micro_batch, training=True)
    every = torch.ones_like(logprobs, dtype=torch.bool)
    result = policy_loss(logprobs, tokens.sampled_logprob, tokens.advantage, every, loss, scale=scale)
    result.loss.backward()
    return Seen(
        tokens=tokens,
        logprobs=logprobs.detach(),
        entropy=entropy,
        mismatch_kl=result.mismatch_kl,
        masked=result.masked,
        loss=result.loss.detach(),
    )


def under_own_version(
    policy: Policy, samples: Sequence[Sample], seen: Sequence[Seen], history: History, *, budget: int
) -> list[Recomputed]:
    """The log-probability of every trained token under the version that sampled it.

    The forward that trained serves for the current version, unless dropout disturbed it. Every other version costs a
    forward over the samples that have tokens of it; afterwards the policy has its newest adapter again, exactly.

    Raises:
        ProofError: A version is not kept.
    """
    versions = {v for s in samples for v, trains in zip(s.versions, s.mask, strict=True) if trains}
    again = versions if policy.has_dropout else versions - {history.newest}
    missing = sorted(again - set(history.versions))
    if missing:
        raise ProofError(
            f"a token was sampled under policy version {missing[0]}, which is not kept (kept: {history.versions}); "
            "the staleness bound must keep such samples out"
        )
    parts = [] if policy.has_dropout else [_current(s, history.newest) for s in seen]
    try:
        for version in sorted(again):
            policy.set_adapter(history[version])
            for micro_batch in pack(samples, budget, policy.device, version=version):
                parts.append(Recomputed(micro_batch.tokens, policy.logprobs(micro_batch, training=False)[0]))
    finally:
        if again:
            policy.set_adapter(history[history.newest])
    return parts


def _current(seen: Seen, version: int) -> Recomputed:
    chosen = seen.tokens.version == version
    return Recomputed(seen.tokens.where(chosen), seen.logprobs[chosen])
