"""Log-probabilities recomputed under policy versions: the one that sampled a token, and alternatives.

The claimed version of a token must fit better than the alternatives. Each alternative costs a forward pass, so only a
share of the samples is scored, evenly spread over the step. Invariant: afterwards the policy has its newest weights
again, exactly.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from harbortrainer.engines.local.learner.logprob_audit import ComparedTokens
from harbortrainer.engines.local.learner.logprob_check import Recomputed
from harbortrainer.engines.local.learner.loss import TrainedBatch
from harbortrainer.engines.local.learner.micro_batch import TrainedTokens, pack
from harbortrainer.engines.local.learner.trained_policy import PolicyWeights, TrainedPolicy
from harbortrainer.engines.local.learner.training_sample import Sample, contexts_of
from harbortrainer.engines.local.learner.version_history import VersionHistory
from harbortrainer.errors import ProofError

SAMPLE_SHARE = 6
"""One sample in this many is scored under alternative versions."""
MIN_TOKENS, MAX_TOKENS = 1024, 65536
"""Tokens of the scored samples, prompts included."""


def recompute_logprobs(
    policy: TrainedPolicy,
    samples: Sequence[Sample],
    trained: Sequence[TrainedBatch],
    history: VersionHistory,
    *,
    max_tokens: int,
) -> Recomputed:
    """Return log-probability and entropy of every trained token under the version that sampled it.

    Tokens of the current version come from the training forward pass, unless it had dropout. Each other version costs a
    forward pass over the samples with tokens of it.

    Raises:
        ProofError: A version is not kept.
    """
    versions = {v for s in samples for v, trains in zip(s.versions, s.mask, strict=True) if trains}
    again = versions if policy.has_dropout else versions - {history.newest}
    missing = sorted(again - set(history.versions))
    if missing:
        raise ProofError(
            f"a token was sampled under policy version {missing[0]}, which is not kept (kept: {history.versions}); "
            "max_off_policy_steps should have dropped it"
        )
    parts = [] if policy.has_dropout else [batch.of_version(history.newest) for batch in trained]
    try:
        for version in sorted(again):
            policy.set_weights(history[version])
            for micro_batch in pack(samples, max_tokens, policy.device, version=version, packing=policy.packing):
                parts.append((micro_batch.tokens, *policy.logprobs(micro_batch, training=False)))
    finally:
        if again:
            policy.set_weights(history[history.newest])
    tokens, logprobs, entropy = zip(*parts, strict=True)
    return Recomputed(TrainedTokens.joined(tokens), torch.cat(logprobs), torch.cat(entropy))


def alternative_logprobs(
    policy: TrainedPolicy,
    samples: Sequence[Sample],
    recomputed: Recomputed,
    history: VersionHistory,
    *,
    max_tokens: int,
) -> dict[str, tuple[ComparedTokens, Tensor]]:
    """Score some of the tokens under alternatives of their claimed version.

    Returns:
        Tokens and their log-probabilities [n] under each alternative. The alternatives are "before", "after", "base"
        (version 0, which is also "before" of version 1) and "larger" (`TrainedPolicy.scaled_up` of the newest claimed
        version). An alternative without tokens is missing.
    """
    everything, stride = compare_tokens(samples, recomputed), stride_of(samples)
    claimed = sorted(set(recomputed.tokens.version.tolist()))
    found: dict[str, list[tuple[ComparedTokens, Tensor]]] = {}
    try:
        for version in claimed:
            chosen = samples[::stride]
            micro_batches = pack(chosen, max_tokens, policy.device, version=version, packing=policy.packing)
            if not micro_batches:
                continue
            scored = TrainedTokens.joined([m.tokens for m in micro_batches])
            own = everything.where(_token_indices(recomputed.tokens, scored, stride))
            larger = policy.scaled_up(history[version]) if version == claimed[-1] else None
            for name, weights in _alternative_weights(history, version, larger).items():
                policy.set_weights(weights)
                logprobs = torch.cat([policy.logprobs(m, training=False)[0] for m in micro_batches])
                found.setdefault(name, []).append((own, logprobs.double().cpu()))
    finally:
        policy.set_weights(history[history.newest])
    return {
        name: (ComparedTokens.joined([own for own, _ in of]), torch.cat([lp for _, lp in of]))
        for name, of in found.items()
    }


def stride_of(samples: Sequence[Sample]) -> int:
    """Return n, where every n-th sample is computed with other versions too.

    n is `SAMPLE_SHARE`; smaller if these samples would have fewer than `MIN_TOKENS` tokens, larger if they would have
    more than `MAX_TOKENS`.
    """
    total = sum(map(len, samples))
    return max(1, round(total / min(max(total / SAMPLE_SHARE, MIN_TOKENS), MAX_TOKENS)))


def _alternative_weights(
    history: VersionHistory, version: int, larger: PolicyWeights | None
) -> dict[str, PolicyWeights]:
    """Return the known weights of the alternatives of a version, by the direction's name."""
    others = {"after": history.find(version + 1)}
    if version > 0:
        others |= {"base": history.base, "larger": larger}
        others["before"] = history.find(version - 1) if version > 1 else None
    return {name: weights for name, weights in others.items() if weights is not None}


def _token_indices(everything: TrainedTokens, scored: TrainedTokens, stride: int) -> Tensor:
    """Return the index [n] of each scored token among all; `scored` numbers every `stride`-th sample only."""
    width = int(everything.position.max()) + 1
    keys, order = (everything.sample * width + everything.position).sort()
    return order[torch.searchsorted(keys, scored.sample * stride * width + scored.position)].cpu()


def compare_tokens(samples: Sequence[Sample], recomputed: Recomputed) -> ComparedTokens:
    """Return recorded and recomputed log-probabilities of all tokens, with a number for each context."""
    tokens = recomputed.tokens
    contexts = [contexts_of(sample.token_ids) for sample in samples]
    where = zip(tokens.sample.tolist(), tokens.position.tolist(), strict=True)
    return ComparedTokens(
        tokens.sampled_logprob.double().cpu(),
        recomputed.logprobs.double().cpu(),
        torch.tensor([contexts[i][t] for i, t in where]),
    )
