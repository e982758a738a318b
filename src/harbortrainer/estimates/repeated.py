"""What repeated attempts at a task say: solved at least once in k (pass@k), solved every time in k (pass^k).

Sources: M. Chen et al., "Evaluating Large Language Models Trained on Code", arXiv:2107.03374, section 2.1 (pass@k);
S. Yao et al., "tau-bench", arXiv:2406.12045, section 3 (pass^k). Both are unbiased for what k fresh attempts would do,
from n >= k that were made. Pure.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

from harbortrainer.estimates.interval import Estimate, IntervalKind, Rewards, mean_reward

SOLVED = 1.0
"""The reward of a solved task, by the convention of Harbor's registry."""


@dataclass(frozen=True, slots=True)
class RepeatedPass:
    """pass@k or pass^k for one k."""

    name: str
    """`pass@4`, `pass^4`."""
    estimate: Estimate
    """Over the tasks that have k graded attempts; `tasks` says how many these are."""


def pass_at(n: int, solved: int, k: int) -> float:
    """Chance that at least one of k attempts solves a task that was solved so often in n: 1 - C(n-c, k) / C(n, k).

    Example:
        >>> pass_at(4, 1, 2)
        0.5
    """
    return 1.0 - math.comb(n - solved, k) / math.comb(n, k)


def pass_hat(n: int, solved: int, k: int) -> float:
    """Chance that all of k attempts solve it: C(c, k) / C(n, k).

    Example:
        >>> pass_hat(4, 2, 2) == 1 / 6
        True
    """
    return math.comb(solved, k) / math.comb(n, k)


def repeated_passes(rewards: Rewards, *, kind: IntervalKind = "t") -> list[RepeatedPass]:
    """pass@k and pass^k for k = 1, 2, 4, ... and the most attempts that a task has; mean over tasks.

    Nothing unless every reward is 0 or 1: of other rewards nobody has said from where on a task is solved.
    """
    if not {value for own in rewards.values() for value in own} <= {0.0, SOLVED}:
        return []
    most = max(map(len, rewards.values()), default=0)
    ks = sorted({2**power for power in range(most.bit_length())} | {most}) if most else []
    return [_pass(rewards, name, k, chance, kind) for name, chance in _CHANCES.items() for k in ks]


_CHANCES: dict[str, Callable[[int, int, int], float]] = {"pass@": pass_at, "pass^": pass_hat}


def _pass(
    rewards: Rewards, name: str, k: int, chance: Callable[[int, int, int], float], kind: IntervalKind
) -> RepeatedPass:
    solved = {key: sum(value >= SOLVED for value in own) for key, own in rewards.items()}
    chances = {key: [chance(len(own), solved[key], k)] for key, own in rewards.items() if len(own) >= k}
    return RepeatedPass(f"{name}{k}", mean_reward(chances, kind=kind))
