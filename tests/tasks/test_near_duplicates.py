"""Similarity is the exact Jaccard index of word trigrams."""

import random

import pytest

from harbortrainer.tasks import near_duplicates
from harbortrainer.tasks.near_duplicates import similar_pairs, word_ngrams, words


def counted(texts: list[set[int]], least: float) -> dict[tuple[int, int], float]:
    """Compare every pair directly."""
    found = {}
    for index, text in enumerate(texts):
        for other, earlier in enumerate(texts[:index]):
            share = len(text & earlier) / len(text | earlier) if text | earlier else 1.0
            if share >= least:
                found[index, other] = share
    return found


@pytest.mark.parametrize("few", [1, 4, 1000])
def test_finds_every_similar_pair_with_its_similarity(monkeypatch: pytest.MonkeyPatch, few: int) -> None:
    """The index of rare n-grams and the matrix product of frequent ones give the same counts."""
    monkeypatch.setattr(near_duplicates, "RARE", few)
    monkeypatch.setattr(near_duplicates, "BLOCK", 7)
    draw = random.Random(0)
    base = [str(number) for number in range(30)]
    texts = [word_ngrams(base[: draw.randrange(25, 30)] + draw.choices(base, k=draw.randrange(8))) for _ in range(40)]
    texts += [set(), word_ngrams(words("a b")), set(), word_ngrams(words("A, b!"))]
    found = {
        (index, int(other)): float(share)
        for index, others, shares in similar_pairs(texts, 0.7)
        for other, share in zip(others, shares, strict=True)
    }
    assert found == pytest.approx(counted(texts, 0.7), abs=1e-6)
    assert len(found) > 50 and found[42, 40] == found[43, 41] == 1.0


def test_words_ignore_case_space_and_punctuation_except_in_tests() -> None:
    assert words("Read  `A.txt`;\nthen STOP") == words("read a.txt then stop")
    assert words("x < 3", signs=True) != words("x > 3", signs=True)


def test_characters_of_scripts_without_spaces_are_words() -> None:
    assert words("\u8bfb\u53d6a.txt") == ["\u8bfb", "\u53d6", "a", "txt"]
    text = "".join(chr(0x4E00 + 7 * n) for n in range(75))
    ((_, others, similarity),) = similar_pairs([word_ngrams(words(text)), word_ngrams(words("\u4e8c" + text[1:]))], 0.8)
    assert (others.tolist(), round(float(similarity[0]), 2)) == ([0], 0.97)


def test_empty_texts_are_similar() -> None:
    assert list(similar_pairs([], 0.5)) == []
