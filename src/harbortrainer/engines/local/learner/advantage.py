"""Group-relative advantages: what a trial's reward is worth next to the other trials of its group.

    advantage_i = s_i - mean(s)          s_i = reward_i, or with a length penalty
    s_i = reward_i - mean(reward) * (w_out * out_i / max(out) + w_in * in_i / max(in) + w_turns * turns_i /
    max(turns))

There is no division by the standard deviation. Every sampled token of a trial gets its trial's advantage;
tokens with an advantage of exactly 0 are pruned before the loss counts its tokens. Source: Prime-RL at
commit 559b44772, `GRPOAlgorithm.score_group` (src/prime_rl/orchestrator/algo/grpo.py),
`LinearLengthPenaltyConfig`, and `_prune_zero_advantages` (train_sink.py). Two things are ours: a group
needs at least two survivors (one alone has an advantage of 0 anyway), and equal scores give exactly 0,
where a mean in floating point could leave 1e-8.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from harbortrainer.engines.local.learner.sample import Sample
from harbortrainer.engines.local.learner.settings import LengthPenalty

MIN_SURVIVORS = 2


@dataclass(frozen=True, slots=True)
class TrialLength:
    """What the length penalty looks at, of one trial."""

    output_tokens: int
    """Tokens that the policy sampled."""

    input_tokens: int
    """All other tokens of the trial."""

    turns: int
    """Answers of the policy."""


def group_advantages(
    rewards: Sequence[float],
    *,
    penalty: LengthPenalty | None = None,
    lengths: Sequence[TrialLength] | None = None,
) -> list[float]:
    """One advantage for each survivor of one group, in order.

    Args:
        rewards: [n] the rewards of the trials that may train (the survivors), and of no others.
        penalty: The length penalty, or None.
        lengths: [n] the trials' lengths; needed with a penalty.

    Returns:
        [n] advantages; all 0 with fewer than two survivors or with equal scores.
    """
    scores = list(rewards)
    if penalty is not None:
        if lengths is None or len(lengths) != len(scores):
            raise ValueError("a length penalty needs the length of every trial")
        scores = _shorter_is_better(scores, penalty, lengths)
    if len(scores) < MIN_SURVIVORS or min(scores) == max(scores):
        return [0.0] * len(scores)
    mean = sum(scores) / len(scores)
    return [score - mean for score in scores]


def _shorter_is_better(rewards: Sequence[float], penalty: LengthPenalty, lengths: Sequence[TrialLength]) -> list[float]:
    if not rewards:
        return []
    mean = sum(rewards) / len(rewards)
    columns = (
        (penalty.num_output_tokens_weight, [x.output_tokens for x in lengths]),
        (penalty.num_input_tokens_weight, [x.input_tokens for x in lengths]),
        (penalty.num_turns_weight, [x.turns for x in lengths]),
    )
    shares = [[weight * x / max(1, *column) for x in column] for weight, column in columns]
    return [r - mean * sum(share) for r, *share in zip(rewards, *shares, strict=True)]


def prune(samples: Iterable[Sample]) -> list[Sample]:
    """The samples that have something to teach: those with an advantage other than 0."""
    return [sample for sample in samples if sample.advantage != 0.0]
