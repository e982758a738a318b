"""Advantages of one group (GRPO): how much better each trial did than the group's mean.

For the n trainable trials of a group, with rewards R [n] in the verifier's unit:

    A_i = s_i - mean(s)                    type "grpo" and "echo"; the unit of the reward
    A_i = s_i - sum(L * s) / sum(L)        the same with length_weighted_baseline; L_i are the trial's sampled tokens
    A_i = (s_i - mean(s)) / mean(s)        type "max_rl"; without a unit, 0 if the mean is not above 0

    s_i = R_i                              without a length penalty, else
    s_i = R_i - mean(R) * (w_out * out_i / max(out) + w_in * in_i / max(in) + w_turns * turns_i / max(turns))

With one trial, or with equal scores, every advantage is exactly 0. There is no division by the standard deviation.
Failed trials are not in R: they do not count as a reward of 0.

Source: Prime-RL at commit 559b44772: `GRPOAlgorithm.score_group` (src/prime_rl/orchestrator/algo/grpo.py),
`MaxRLAlgorithm` (max_rl.py) and `LinearLengthPenaltyConfig`. The length-weighted baseline is that of newer releases.
One difference: equal scores give exactly 0 here, where a floating-point mean could leave 1e-8.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import fsum
from operator import mul

from harbortrainer.config.algorithm_config import LengthPenalty

MIN_TRAINABLE = 2
"""Trainable trials that a group needs for a baseline."""
LEAST_MEAN = 1e-6
"""Share of the largest reward (at least 1) up to which a mean counts as 0 with "max_rl": rewards that cancel out."""


@dataclass(frozen=True, slots=True)
class TrialLength:
    """Lengths of one trial. In the first three, for the length penalty, tokens that branches share count in each."""

    output_tokens: int
    """Tokens that the policy sampled."""

    input_tokens: int
    """All other tokens."""

    turns: int
    """Completions of the policy."""

    sampled_tokens: int = 0
    """Tokens that the policy sampled, each counted once, for the length-weighted baseline."""


def group_advantages(
    rewards: Sequence[float],
    *,
    penalty: LengthPenalty | None = None,
    lengths: Sequence[TrialLength] | None = None,
    length_weighted: bool = False,
    normalized: bool = False,
) -> list[float]:
    """Return the advantage of each trainable trial of one group, in order.

    Args:
        rewards: [n] rewards of the trainable trials, and of no others.
        penalty: The length penalty, or None.
        lengths: [n] lengths of the same trials; required with a penalty or a length-weighted baseline.
        length_weighted: Weight each trial by its sampled tokens in the mean.
        normalized: Divide by the mean, as "max_rl" does.

    Returns:
        [n] advantages; all 0 with fewer than `MIN_TRAINABLE` trials or with equal scores.

    Raises:
        ValueError: Lengths are required, and there is not one for each trial.
    """
    scores, weights = list(rewards), [1] * len(rewards)
    if penalty is not None or length_weighted:
        if lengths is None or len(lengths) != len(scores):
            raise ValueError("a length penalty or a length-weighted baseline needs the length of every trial")
        scores = scores if penalty is None else _penalized(scores, penalty, lengths)
        weights = [length.sampled_tokens for length in lengths] if length_weighted else weights
    if len(scores) < MIN_TRAINABLE or min(scores) == max(scores):
        return [0.0] * len(scores)
    mean = fsum(map(mul, weights, scores)) / sum(weights)
    if normalized:
        least = LEAST_MEAN * max(1.0, *map(abs, scores))
        return [(score - mean) / mean if mean > least else 0.0 for score in scores]
    return [score - mean for score in scores]


def _penalized(rewards: Sequence[float], penalty: LengthPenalty, lengths: Sequence[TrialLength]) -> list[float]:
    """Return the scores [n]: rewards minus the length penalty."""
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
