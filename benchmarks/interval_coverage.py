"""Measure the coverage of the confidence intervals: simulated evaluations with a known true mean.

    python benchmarks/interval_coverage.py [--evaluations 1000] [--seed 0]

Each evaluation draws tasks from a population with a known mean solve rate, and attempts each task k times. Some
attempts are lost at random, as with a failing sandbox. `harbortrainer.estimates` computes the interval as in `eval`.

Prints the share of evaluations whose 95 % interval contains the true mean. For paired comparisons it also prints the
rate of false positives, and the power at the minimum detectable difference that the comparison reports.
"""

import argparse
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from harbortrainer.estimates.interval import IntervalKind, Rewards, mean_reward
from harbortrainer.estimates.paired import PairedDifference, paired_difference

LOST = 0.03


@dataclass(frozen=True)
class Setting:
    """A population of tasks, and the size of an evaluation."""

    tasks: int
    attempts: int
    alpha: float
    beta: float
    """Solve rates are drawn from Beta(alpha, beta)."""

    @property
    def truth(self) -> float:
        """Mean solve rate of the population."""
        return self.alpha / (self.alpha + self.beta)

    def __str__(self) -> str:
        return f"{self.tasks:4d} tasks x {self.attempts}, solve rates Beta({self.alpha:g}, {self.beta:g})"


SETTINGS = (
    Setting(20, 4, 1.0, 1.0),
    Setting(32, 5, 0.5, 1.5),
    Setting(50, 1, 0.5, 0.5),
    Setting(100, 8, 0.5, 0.5),
    Setting(89, 5, 0.6, 0.6),
    Setting(300, 2, 0.4, 1.2),
    Setting(20, 4, 0.1, 1.9),  # nearly all attempts fail, the hardest case
)


def attempted(rates: np.ndarray, attempts: int, rng: np.random.Generator) -> Rewards:
    """Simulate the rewards of tasks with these solve rates; the share `LOST` of attempts is lost."""
    solved = rng.random((rates.size, attempts)) < rates[:, None]
    kept = rng.random((rates.size, attempts)) >= LOST
    return {str(i): [float(s) for s, k in zip(solved[i], kept[i], strict=True) if k] for i in range(rates.size)}


def coverage(setting: Setting, evaluations: int, *, kind: IntervalKind = "t", seed: int = 0) -> float:
    """Return the share of evaluations whose interval contains the true mean."""
    rng = np.random.default_rng(seed)
    held = 0
    for number in range(evaluations):
        rates = rng.beta(setting.alpha, setting.beta, setting.tasks)
        found = mean_reward(attempted(rates, setting.attempts, rng), kind=kind, seed=number)
        held += found.low is not None and found.high is not None and found.low <= setting.truth <= found.high
    return held / evaluations


def comparisons(
    setting: Setting, evaluations: int, *, gain: float, spread: float = 0.1, seed: int = 0
) -> Iterator[PairedDifference]:
    """Yield comparisons of a policy with one that is better by `gain` on average; the gain varies between tasks."""
    rng = np.random.default_rng(seed)
    for _ in range(evaluations):
        # Between 0.3 and 0.7, so that no gain is clipped at 0 or 1, which would change the true mean.
        rates = 0.3 + 0.4 * rng.beta(setting.alpha, setting.beta, setting.tasks)
        better = rates + gain + rng.uniform(-spread, spread, setting.tasks)
        found = paired_difference(attempted(rates, setting.attempts, rng), attempted(better, setting.attempts, rng))
        assert found is not None
        yield found


def compared(setting: Setting, evaluations: int, *, seed: int = 0) -> tuple[float, float, float]:
    """Return the coverage of the difference's interval, the rate of false positives, and the power.

    The power is measured at the mean minimum detectable difference that the comparisons report.
    """
    without = list(comparisons(setting, evaluations, gain=0.0, seed=seed))
    gain = float(np.mean([found.min_detectable for found in without if found.min_detectable is not None]))
    with_it = list(comparisons(setting, evaluations, gain=gain, spread=0.1, seed=seed + 1))
    held = np.mean(
        [found.low is not None and found.high is not None and found.low <= gain <= found.high for found in with_it]
    )
    return (
        float(held),
        float(np.mean([f.significant for f in without])),
        float(np.mean([f.significant for f in with_it])),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--evaluations", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    print(f"{given.evaluations} evaluations each: share whose 95 % interval contains the true mean")
    for setting in SETTINGS:
        shares = {kind: coverage(setting, given.evaluations, kind=kind, seed=given.seed) for kind in ("t", "bootstrap")}
        print(f"{setting}:  t {shares['t']:.3f}  bootstrap {shares['bootstrap']:.3f}", flush=True)
    print("paired comparisons: coverage, false positives, power at the minimum detectable difference")
    for setting in SETTINGS:
        held, alarms, power = compared(setting, given.evaluations, seed=given.seed)
        print(f"{setting}:  {held:.3f}  {alarms:.3f}  {power:.3f}", flush=True)


if __name__ == "__main__":
    main()
