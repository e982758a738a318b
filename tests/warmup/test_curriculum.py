"""The curriculum of the tiny policy, with a pupil that learns at once."""

from collections.abc import Sequence

import pytest

pytest.importorskip("torch")

from harbortrainer.errors import UserError
from harbortrainer.warmup.encoding import Encoded
from tiny_policy.curriculum import CHECK_EVERY, UNSURE_STEPS, Curriculum, Lesson, Mark

SOLUTION, MISTAKE = Encoded([1], [True]), Encoded([0], [True])
LESSONS = [Lesson(SOLUTION, MISTAKE)] * 16


class QuickPupil:
    """Its success is the share of solutions among the last hundred sequences it saw."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    def step(self, episodes: Sequence[Encoded], *, scale: float) -> float:
        self.seen += [episode.ids[0] for episode in episodes]
        return 1.0

    def likelihood(self, episodes: Sequence[Encoded]) -> list[float]:
        last = self.seen[-100:]
        return [sum(last) / len(last)] * len(episodes)


class StubbornPupil(QuickPupil):
    """Never learns."""

    def likelihood(self, episodes: Sequence[Encoded]) -> list[float]:
        return [0.0] * len(episodes)


def _curriculum(pupil: QuickPupil, target: float = 0.3) -> Curriculum:
    return Curriculum(pupil, LESSONS, batch_size=20, target=target, seed=0)


def test_a_curriculum_ends_at_its_target():
    mark = _curriculum(QuickPupil()).teach(400, slack=0.05)
    assert abs(mark.success - 0.3) <= 0.05


def test_mistakes_come_only_once_the_solutions_are_known():
    pupil, marks = QuickPupil(), list[Mark]()
    _curriculum(pupil).teach(400, slack=0.05, report=marks.append)
    assert marks[0].success == 1.0
    assert all(pupil.seen[: CHECK_EVERY * 20])
    assert marks[-1].step >= CHECK_EVERY + UNSURE_STEPS


def test_a_curriculum_goes_on_with_another_target():
    curriculum = _curriculum(QuickPupil())
    first = curriculum.teach(800, slack=0.05)
    curriculum.target = 0.6
    second = curriculum.teach(800, slack=0.05)
    assert second.step > first.step
    assert abs(second.success - 0.6) <= 0.05


def test_a_pupil_that_never_learns_is_told():
    with pytest.raises(UserError, match=r"0\.00 after 100 steps"):
        _curriculum(StubbornPupil()).teach(100, slack=0.05)
