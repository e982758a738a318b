"""The curriculum of the tiny policy, with a stub learner that learns at once."""

from collections.abc import Sequence

import pytest

pytest.importorskip("torch")

from harbortrainer.errors import UserError
from harbortrainer.warmup.encoding import Encoded
from tiny_policy.curriculum import CHECK_EVERY, MIXED_STEPS, Curriculum, Example, Progress
from tiny_policy.warm_up import is_within

SOLUTION, MISTAKE = Encoded([1], [True]), Encoded([0], [True])
EXAMPLES = [Example(SOLUTION, MISTAKE)] * 16


class QuickLearner:
    """A learner whose success is the share of solutions among its last hundred sequences."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    def step(self, episodes: Sequence[Encoded], *, scale: float) -> float:
        self.seen += [episode.ids[0] for episode in episodes]
        return 1.0

    def likelihood(self, episodes: Sequence[Encoded]) -> list[float]:
        last = self.seen[-100:]
        return [sum(last) / len(last)] * len(episodes)


class StuckLearner(QuickLearner):
    """A learner that never learns."""

    def likelihood(self, episodes: Sequence[Encoded]) -> list[float]:
        return [0.0] * len(episodes)


def _curriculum(learner: QuickLearner, target: float = 0.3) -> Curriculum:
    return Curriculum(learner, EXAMPLES, batch_size=20, target=target, seed=0)


def test_curriculum_stops_at_target():
    progress = _curriculum(QuickLearner()).train(400, tolerance=0.05)
    assert abs(progress.success - 0.3) <= 0.05


def test_mistakes_start_after_solutions_are_learned():
    learner, reports = QuickLearner(), list[Progress]()
    _curriculum(learner).train(400, tolerance=0.05, report=reports.append)
    assert reports[0].success == 1.0
    assert all(learner.seen[: CHECK_EVERY * 20])
    assert reports[-1].step >= CHECK_EVERY + MIXED_STEPS


def test_curriculum_continues_with_new_target():
    curriculum = _curriculum(QuickLearner())
    first = curriculum.train(800, tolerance=0.05)
    curriculum.target = 0.6
    second = curriculum.train(800, tolerance=0.05)
    assert second.step > first.step
    assert abs(second.success - 0.6) <= 0.05


def test_curriculum_reports_failure_to_learn():
    with pytest.raises(UserError, match=r"0\.00 after 100 steps"):
        _curriculum(StuckLearner()).train(100, tolerance=0.05)


@pytest.mark.parametrize(
    ("mean", "trials", "accepted"),
    [(0.3, 64, True), (0.41, 64, True), (0.41, 6400, False), (0.5, 64, False), (0.11, 64, False), (0.0, 64, False)],
)
def test_mean_reward_may_miss_range_by_one_standard_error(mean, trials, accepted):
    assert is_within(mean, trials, (0.2, 0.4)) is accepted
