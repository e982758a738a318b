"""Duplicate and near-duplicate tasks, which must not be both trained on and evaluated on.

Two tasks are the same if their content is equal, or if their tests and environments are. They are near copies if the
similarity of their instructions **and** of their tests reaches a threshold (`near_copy`). A different environment alone
does not make two tasks different. A reworded task with new tests is not found.

The similarity of two texts is the Jaccard index of their word trigrams, from 0 to 1; it is exact. Invariant: there is
no loop over pairs. An index finds the texts that share a trigram, and a trigram of a single text costs nothing.
"""

import hashlib
import json
import re
import unicodedata
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from harbortrainer.tasks.content_key import content_key
from harbortrainer.tasks.task_folder import TaskRef

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

NGRAM = 3
"""Words in an n-gram."""

RARE, BLOCK = 32, 256
"""Most texts that hold a rare n-gram; rows of one matrix product."""

type Row = tuple[int, "NDArray[np.intp]", "NDArray[np.float64]"]

_UNSPACED = "\u0e00-\u0eff\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff"
"""Thai, Lao, Khmer, Japanese and Chinese characters: these scripts have no spaces, so each character is a word."""
_WORD = rf"[{_UNSPACED}]|[^\W{_UNSPACED}]+"
_WORDS = re.compile(_WORD)
_WORDS_AND_SIGNS = re.compile(rf"{_WORD}|[^\w\s]")


def words(text: str, *, signs: bool = False) -> list[str]:
    """Split a text into casefolded words; with `signs`, punctuation marks are kept as words.

    Example:
        >>> words("Read `A.txt`!")
        ['read', 'a', 'txt']
    """
    pattern = _WORDS_AND_SIGNS if signs else _WORDS
    return pattern.findall(unicodedata.normalize("NFKC", text).casefold())


def word_ngrams(tokens: Sequence[str]) -> set[int]:
    """Hash the n-grams of `NGRAM` words; a shorter text is one n-gram. The hashes are valid in this process only."""
    if not tokens:
        return set()
    ngrams = zip(*(tokens[start:] for start in range(NGRAM)), strict=False)
    return {hash(ngram) for ngram in ngrams} or {hash(tuple(tokens))}


def similar_pairs(texts: Sequence[set[int]], threshold: float) -> Iterator[Row]:
    """Yield each text with similar earlier texts: its index, their indices, and the similarities.

    Texts are similar from `threshold` on. Two texts without a word have a similarity of 1.
    """
    import numpy as np

    sizes = np.array([len(text) for text in texts], dtype=np.intp)
    yield from _empty_texts(np.flatnonzero(sizes == 0))
    for index, common in enumerate(_common_ngrams(texts, sizes)):
        similarity = common[:index] / np.maximum(sizes[index] + sizes[:index] - common[:index], 1)
        near = np.flatnonzero(similarity >= threshold)
        if len(near):
            yield index, near, similarity[near]


def _common_ngrams(texts: Sequence[set[int]], sizes: "NDArray[np.intp]") -> Iterator["NDArray[np.float32]"]:
    """Yield for each of T texts the number of n-grams that it shares with each text, `[T]`.

    Rare n-grams are counted with an inverted index; frequent ones (texts from one template) with a matrix product.
    """
    import numpy as np

    count = len(texts)
    found = np.fromiter((ngram for text in texts for ngram in text), np.int64, int(sizes.sum()))
    _, which, holders = np.unique(found, return_inverse=True, return_counts=True)
    owner = np.repeat(np.arange(count), sizes)
    many = holders > max(RARE, count // RARE)
    matrix = np.zeros((count, int(many.sum())), dtype=np.float32)
    matrix[owner[many[which]], (np.cumsum(many) - 1)[which[many[which]]]] = 1
    few = (holders > 1)[which] & ~many[which]
    which, owner = which[few], owner[few]
    held_by = owner[np.argsort(which, kind="stable")]
    ends = np.concatenate([[0], np.cumsum(np.bincount(which, minlength=len(holders)))])
    own = np.split(which, np.cumsum(np.bincount(owner, minlength=count))[:-1]) if count else []
    for start in range(0, count, BLOCK):
        common = matrix[start : start + BLOCK] @ matrix.T
        for row, rare_ngrams in zip(common, own[start : start + BLOCK], strict=True):
            lists = [held_by[ends[ngram] : ends[ngram + 1]] for ngram in rare_ngrams]
            yield row + np.bincount(np.concatenate(lists), minlength=count) if lists else row


def _empty_texts(empty: "NDArray[np.intp]") -> Iterator[Row]:
    import numpy as np

    for position in range(1, len(empty)):
        yield int(empty[position]), empty[:position], np.ones(position)


LONGEST_TEXT = 1 << 20
"""Largest test file, in bytes, that is split into words; a longer or binary file counts as one word."""

SAME, SAME_GRADING = "the same content", "the same tests and environment"


@dataclass(frozen=True)
class CopyPair:
    """A task and the task that it duplicates."""

    task: TaskRef
    of: TaskRef
    reason: str

    def __str__(self) -> str:
        return f"{self.task.name} = {self.of.name} ({self.reason})"


def overlap(trained: Sequence[TaskRef], held_out: Sequence[TaskRef], threshold: float) -> list[CopyPair]:
    """Return the held-out tasks that duplicate a trained task, each with the most similar trained task.

    Args:
        trained: Training tasks.
        held_out: Evaluation tasks.
        threshold: Similarity from which two tasks are near copies, above 0 and at most 1.
    """
    if not trained or not held_out:
        return []
    tasks, first = [*trained, *held_out], len(trained)
    best: dict[int, tuple[float, int, str]] = {}
    for reason, rank, equal in ((SAME, 3.0, _same_content(tasks)), (SAME_GRADING, 2.0, _same_grading(tasks))):
        for group in equal:
            for index in group:
                if group[0] < first <= index:
                    best.setdefault(index, (rank, group[0], reason))
    for index, others, similarity in _near_copies(tasks, threshold, first):
        other, share = int(others[similarity.argmax()]), float(similarity.max())
        best.setdefault(index, (share, other, f"{share:.0%} similar"))
    return [CopyPair(tasks[index], tasks[of], reason) for index, (_, of, reason) in sorted(best.items())]


def copy_groups(tasks: Sequence[TaskRef], threshold: float) -> list[list[TaskRef]]:
    """Group the tasks so that duplicates, also indirect ones, are in one group; most groups hold one task."""
    import numpy as np

    label = np.arange(len(tasks))

    def unite(indices: "NDArray[np.intp]") -> None:
        label[np.isin(label, label[indices])] = label[indices].min()

    for equal in (*_same_content(tasks), *_same_grading(tasks)):
        unite(np.array(equal))
    for index, others, _ in _near_copies(tasks, threshold):
        unite(np.append(others, index))
    found: dict[int, list[TaskRef]] = defaultdict(list)
    for index, task in enumerate(tasks):
        found[int(label[index])].append(task)
    return list(found.values())


def _same_content(tasks: Sequence[TaskRef]) -> list[list[int]]:
    return _equal((task.key, index) for index, task in enumerate(tasks))


def _same_grading(tasks: Sequence[TaskRef]) -> Iterator[list[int]]:
    """Group tasks with equal tests, environments and task.toml tables; reads environments only if tests agree."""
    for same_tests in _equal((tests_key(task), index) for index, task in enumerate(tasks)):
        yield from _equal((_environment_key(tasks[index]), index) for index in same_tests)


def _equal(keys: Iterable[tuple[str, int]]) -> list[list[int]]:
    """Group the indices with equal keys; an empty key equals no other."""
    found: dict[str, list[int]] = defaultdict(list)
    for key, index in keys:
        if key:
            found[key].append(index)
    return [group for group in found.values() if len(group) > 1]


def _near_copies(tasks: Sequence[TaskRef], threshold: float, first: int = 0) -> Iterator[Row]:
    """Yield near copies as `similar_pairs` does, with the smaller similarity of instructions and tests.

    With `first`, tasks before that index are compared only with the tasks from it on. Tests are read only for tasks
    with similar instructions.
    """
    import numpy as np

    instructions = [word_ngrams(words(task.instruction)) for task in tasks]
    similar = {index: (others, similarity) for index, others, similarity in similar_pairs(instructions, threshold)}
    if first:
        masks = {index: found[0] < first for index, found in similar.items() if index >= first}
        similar = {
            index: (similar[index][0][mask], similar[index][1][mask]) for index, mask in masks.items() if mask.any()
        }
    candidates = np.unique(
        np.concatenate([np.array(list(similar), dtype=int), *(others for others, _ in similar.values())])
    )
    tests = [word_ngrams(_tests_words(tasks[index])) for index in candidates]
    for position, others, similarity in similar_pairs(tests, threshold):
        index = int(candidates[position])
        if index in similar:
            both, in_similar, in_tests = np.intersect1d(similar[index][0], candidates[others], return_indices=True)
            if len(both):
                yield index, both, np.minimum(similar[index][1][in_similar], similarity[in_tests])


def tests_key(task: TaskRef) -> str:
    """Hash of the task's test folders; empty if it has none."""
    return "\n".join(content_key(folder) for folder in _tests_folders(task.path))


def _tests_folders(folder: Path) -> list[Path]:
    return [path for path in (folder / "tests", *sorted(folder.glob("steps/*/tests"))) if path.is_dir()]


def _environment_key(task: TaskRef) -> str:
    folder = task.path / "environment"
    tables = json.dumps(
        [task.config.get(name) for name in ("verifier", "environment", "steps")], default=str, sort_keys=True
    )
    return f"{content_key(folder) if folder.is_dir() else ''} {tables}"


def _tests_words(task: TaskRef) -> list[str]:
    files = [file for folder in _tests_folders(task.path) for file in sorted(folder.rglob("*")) if file.is_file()]
    return [word for file in files for word in _file_words(file)]


def _file_words(path: Path) -> list[str]:
    try:
        with path.open("rb") as file:
            data = file.read(LONGEST_TEXT + 1)
            if len(data) <= LONGEST_TEXT and (text := _decoded(data)) is not None:
                return words(text, signs=True)
            file.seek(0)
            return [hashlib.file_digest(file, "sha256").hexdigest()]
    except OSError:  # for example a link into /proc
        return []


def _decoded(data: bytes) -> str | None:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return None
