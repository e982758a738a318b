"""The policy's versions: their weights, and every trained token again under the version that sampled it, and others.

The version that is claimed has to fit best. Each other version costs a forward pass, so that a share of the samples is
asked, evenly spread over the step. Afterwards the policy has its newest weights again, exactly.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from harbortrainer.engines.local.learner.evidence import Compared
from harbortrainer.engines.local.learner.loss import TrainedBatch
from harbortrainer.engines.local.learner.micro_batch import TrainedTokens, pack
from harbortrainer.engines.local.learner.proof import Recomputed
from harbortrainer.engines.local.learner.trained_policy import PolicyWeights, TrainedPolicy
from harbortrainer.engines.local.learner.training_sample import Sample, contexts_of
from harbortrainer.errors import ProofError

SHARE = 6
"""One sample in so many is asked about other versions."""
LEAST_TOKENS, MOST_TOKENS = 1024, 65536
"""Of the samples that are asked, prompts included."""


class VersionHistory:
    """The weights of the last policy versions, on the CPU: at most `keep`, the oldest goes first; never empty. Beside
    them those of the version that was forgotten last, and those of version 0.

    Args:
        base: What version 0 computes with.
    """

    def __init__(self, keep: int, base: PolicyWeights) -> None:
        self._keep, self.base = max(1, keep), base
        self._versions = {0: base}
        self._neighbour: dict[int, PolicyWeights] = {}

    @property
    def versions(self) -> list[int]:
        """The kept versions, oldest first."""
        return list(self._versions)

    @property
    def newest(self) -> int:
        """The current version."""
        return self.versions[-1]

    def __getitem__(self, version: int) -> PolicyWeights:
        return self._versions[version]

    def add(self, weights: PolicyWeights) -> None:
        """Take in the next version and forget the oldest when there are too many."""
        self._versions[self.newest + 1] = weights
        if len(self._versions) > self._keep:
            oldest = self.versions[0]
            self._neighbour = {oldest: self._versions.pop(oldest)}

    def restart(self, version: int, weights: PolicyWeights) -> None:
        """Keep this version alone."""
        self._versions, self._neighbour = {version: weights}, {}

    def known(self, version: int) -> PolicyWeights | None:
        """The weights of a version to compare with: kept, or the last one that was forgotten."""
        return (self._versions | self._neighbour).get(version)


def under_own_version(
    policy: TrainedPolicy,
    samples: Sequence[Sample],
    trained: Sequence[TrainedBatch],
    history: VersionHistory,
    *,
    budget: int,
) -> Recomputed:
    """Log-probability and entropy of every trained token under the version that sampled it.

    The forward that trained serves for the current version, unless dropout disturbed it. Every other version costs a
    forward over the samples that have tokens of it; afterwards the policy has its newest weights again, exactly.

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
    parts = [] if policy.has_dropout else [batch.of_version(history.newest) for batch in trained]
    try:
        for version in sorted(again):
            policy.set_weights(history[version])
            for micro_batch in pack(samples, budget, policy.device, version=version, packing=policy.packing):
                parts.append((micro_batch.tokens, *policy.logprobs(micro_batch, training=False)))
    finally:
        if again:
            policy.set_weights(history[history.newest])
    tokens, logprobs, entropy = zip(*parts, strict=True)
    return Recomputed(TrainedTokens.joined(tokens), torch.cat(logprobs), torch.cat(entropy))


def other_versions(
    policy: TrainedPolicy, samples: Sequence[Sample], recomputed: Recomputed, history: VersionHistory, *, budget: int
) -> dict[str, tuple[Compared, Tensor]]:
    """Some tokens beside other versions than the one that is claimed.

    Returns:
        For "before", "after", "base" (version 0, the version before where that is 0) and "larger" (the newest version,
        as `TrainedPolicy.larger` has it): the tokens of which that one is known, and their log-probability [n] under
        it. A name is missing where there are no such tokens.
    """
    everything, stride = compared(samples, recomputed), stride_of(samples)
    claimed = sorted(set(recomputed.tokens.version.tolist()))
    found: dict[str, list[tuple[Compared, Tensor]]] = {}
    try:
        for version in claimed:
            asking = samples[::stride]
            micro_batches = pack(asking, budget, policy.device, version=version, packing=policy.packing)
            if not micro_batches:
                continue
            asked = TrainedTokens.joined([m.tokens for m in micro_batches])
            own = everything.where(_places(recomputed.tokens, asked, stride))
            larger = policy.larger(history[version]) if version == claimed[-1] else None
            for name, weights in _others(history, version, larger).items():
                policy.set_weights(weights)
                logprobs = torch.cat([policy.logprobs(m, training=False)[0] for m in micro_batches])
                found.setdefault(name, []).append((own, logprobs.double().cpu()))
    finally:
        policy.set_weights(history[history.newest])
    return {
        name: (Compared.joined([own for own, _ in of]), torch.cat([lp for _, lp in of])) for name, of in found.items()
    }


def stride_of(samples: Sequence[Sample]) -> int:
    """Every how-manieth sample is asked: `SHARE`, less where that gives few tokens, more where it gives many."""
    total = sum(map(len, samples))
    return max(1, round(total / min(max(total / SHARE, LEAST_TOKENS), MOST_TOKENS)))


def _others(history: VersionHistory, version: int, larger: PolicyWeights | None) -> dict[str, PolicyWeights]:
    """What is known of the versions beside this one, by the direction's name."""
    others = {"after": history.known(version + 1)}
    if version > 0:
        others |= {"base": history.base, "larger": larger}
        others["before"] = history.known(version - 1) if version > 1 else None
    return {name: weights for name, weights in others.items() if weights is not None}


def _places(everything: TrainedTokens, asked: TrainedTokens, stride: int) -> Tensor:
    """[n] where each token that is asked stands among all; `asked` counts every `stride`-th sample only."""
    width = int(everything.position.max()) + 1
    keys, order = (everything.sample * width + everything.position).sort()
    return order[torch.searchsorted(keys, asked.sample * stride * width + asked.position)].cpu()


def compared(samples: Sequence[Sample], recomputed: Recomputed) -> Compared:
    """Recorded and recomputed log-probabilities, and which tokens share everything before them."""
    tokens = recomputed.tokens
    contexts = [contexts_of(sample.token_ids) for sample in samples]
    where = zip(tokens.sample.tolist(), tokens.position.tolist(), strict=True)
    return Compared(
        tokens.sampled_logprob.double().cpu(),
        recomputed.logprobs.double().cpu(),
        torch.tensor([contexts[i][t] for i, t in where]),
    )
