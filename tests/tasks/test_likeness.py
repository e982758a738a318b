"""Likeness is Jaccard's over runs of three words: exact, whatever the index holds back."""

import random

import pytest

from harbortrainer.tasks import likeness
from harbortrainer.tasks.likeness import alike, runs, words


def counted(texts: list[set[int]], least: float) -> dict[tuple[int, int], float]:
    """Every pair, counted one by one."""
    found = {}
    for index, text in enumerate(texts):
        for other, earlier in enumerate(texts[:index]):
            share = len(text & earlier) / len(text | earlier) if text | earlier else 1.0
            if share >= least:
                found[index, other] = share
    return found


@pytest.mark.parametrize("few", [1, 4, 1000])
def test_every_pair_that_is_alike_is_found_with_its_likeness(monkeypatch: pytest.MonkeyPatch, few: int) -> None:
    """Whether the runs are counted from the index (few hold one) or by the product of matrices (many do)."""
    monkeypatch.setattr(likeness, "FEW", few)
    monkeypatch.setattr(likeness, "BLOCK", 7)
    draw = random.Random(0)
    base = [str(number) for number in range(30)]
    texts = [runs(base[: draw.randrange(25, 30)] + draw.choices(base, k=draw.randrange(8))) for _ in range(40)]
    texts += [set(), runs(words("a b")), set(), runs(words("A, b!"))]
    found = {
        (index, int(other)): float(share)
        for index, others, shares in alike(texts, 0.7)
        for other, share in zip(others, shares, strict=True)
    }
    assert found == pytest.approx(counted(texts, 0.7), abs=1e-6)
    assert len(found) > 50 and found[42, 40] == found[43, 41] == 1.0


def test_case_space_and_punctuation_make_no_other_text_but_signs_do_in_tests() -> None:
    assert words("Read  `A.txt`;\nthen STOP") == words("read a.txt then stop")
    assert words("x < 3", signs=True) != words("x > 3", signs=True)


def test_nothing_is_alike_nothing() -> None:
    assert list(alike([], 0.5)) == []
