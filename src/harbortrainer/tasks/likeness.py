"""How alike texts are: the share of runs of three words that two of them have in common.

The likeness of two texts is Jaccard's: runs that both have, of all that either has, from 0 to 1. Exact, no estimate.
Invariant: no loop over pairs: an index tells which texts share a run, and a run that one text alone has costs nothing.
"""

import re
import unicodedata
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

RUN = 3
"""Words of one run."""

FEW, BLOCK = 32, 256
"""Texts that may hold a run before it is one of many; rows of one product of matrices."""

type Row = tuple[int, "NDArray[np.intp]", "NDArray[np.float64]"]

_WORDS = re.compile(r"\w+")
_WORDS_AND_SIGNS = re.compile(r"\w+|[^\w\s]")


def words(text: str, *, signs: bool = False) -> list[str]:
    """A text without case, white space and, but for `signs`, punctuation.

    Example:
        >>> words("Read `A.txt`!")
        ['read', 'a', 'txt']
    """
    pattern = _WORDS_AND_SIGNS if signs else _WORDS
    return pattern.findall(unicodedata.normalize("NFKC", text).casefold())


def runs(tokens: Sequence[str]) -> set[int]:
    """Hashes of the runs of `RUN` words, good within this process; of the whole text when it is shorter."""
    if not tokens:
        return set()
    return {hash(run) for run in zip(*(tokens[start:] for start in range(RUN)), strict=False)} or {hash(tuple(tokens))}


def alike(texts: Sequence[set[int]], least: float) -> Iterator[Row]:
    """For each text that is alike earlier ones to `least` or more: its index, theirs, and the likenesses.

    Two texts without a word are alike.
    """
    import numpy as np

    sizes = np.array([len(text) for text in texts], dtype=np.intp)
    yield from _empty_ones(np.flatnonzero(sizes == 0))
    for index, common in enumerate(_common_runs(texts, sizes)):
        likeness = common[:index] / np.maximum(sizes[index] + sizes[:index] - common[:index], 1)
        near = np.flatnonzero(likeness >= least)
        if len(near):
            yield index, near, likeness[near]


def _common_runs(texts: Sequence[set[int]], sizes: "NDArray[np.intp]") -> Iterator["NDArray[np.float32]"]:
    """[T] For each text, how many runs it has in common with each: those of a few texts from an index of who holds
    them, those of many by a product of matrices, which a family of texts from one template needs."""
    import numpy as np

    count = len(texts)
    found = np.fromiter((run for text in texts for run in text), np.int64, int(sizes.sum()))
    _, which, holders = np.unique(found, return_inverse=True, return_counts=True)
    owner = np.repeat(np.arange(count), sizes)
    many = holders > max(FEW, count // FEW)
    matrix = np.zeros((count, int(many.sum())), dtype=np.float32)
    matrix[owner[many[which]], (np.cumsum(many) - 1)[which[many[which]]]] = 1
    few = (holders > 1)[which] & ~many[which]
    which, owner = which[few], owner[few]
    held_by = owner[np.argsort(which, kind="stable")]
    ends = np.concatenate([[0], np.cumsum(np.bincount(which, minlength=len(holders)))])
    own = np.split(which, np.cumsum(np.bincount(owner, minlength=count))[:-1]) if count else []
    for start in range(0, count, BLOCK):
        common = matrix[start : start + BLOCK] @ matrix.T
        for row, runs_of_few in zip(common, own[start : start + BLOCK], strict=True):
            lists = [held_by[ends[run] : ends[run + 1]] for run in runs_of_few]
            yield row + np.bincount(np.concatenate(lists), minlength=count) if lists else row


def _empty_ones(empty: "NDArray[np.intp]") -> Iterator[Row]:
    import numpy as np

    for position in range(1, len(empty)):
        yield int(empty[position]), empty[:position], np.ones(position)
