"""Which tasks are the same task, or near copies: what must not be trained on and measured with at once.

Two tasks are the same when their content is, or when what grades them and what they start from is: then whoever solves
one solves the other, whatever the instructions say. They are near copies when their instructions **and** their tests
are alike to a share (`near_copy`, by runs of three words, see `likeness`). Another environment alone does not set two
tasks apart. What no words show, the same task told anew with tests of its own, is not found.
"""

import hashlib
import json
import tomllib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from harbortrainer.tasks.likeness import Row, alike, runs, words
from harbortrainer.tasks.task_folder import TASK_FILE, TaskRef, content_key

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

LONGEST_TEXT = 1 << 20
"""Bytes of a file of tests that is read as words; a longer one counts as a single word, as does one that is no text."""

SAME, SAME_GRADING = "the same content", "the same tests and environment"


@dataclass(frozen=True)
class Copies:
    """Two tasks that count as one."""

    task: TaskRef
    of: TaskRef
    why: str

    def __str__(self) -> str:
        return f"{self.task.name} = {self.of.name} ({self.why})"


def overlap(trained: Sequence[TaskRef], held_out: Sequence[TaskRef], least: float) -> list[Copies]:
    """The held-out tasks that are trained on too, each with the trained task that is most like it.

    Args:
        trained: What is trained on.
        held_out: What is measured with.
        least: Likeness from which two tasks are near copies, above 0 and at most 1.
    """
    if not trained or not held_out:
        return []
    tasks, first = [*trained, *held_out], len(trained)
    best: dict[int, tuple[float, int, str]] = {}
    for why, rank, equal in ((SAME, 3.0, _by_content(tasks)), (SAME_GRADING, 2.0, _by_grading(tasks))):
        for group in equal:
            for index in group:
                if group[0] < first <= index:
                    best.setdefault(index, (rank, group[0], why))
    for index, others, likeness in _near(tasks, least, first):
        other, share = int(others[likeness.argmax()]), float(likeness.max())
        best.setdefault(index, (share, other, f"alike to {share:.0%}"))
    return [Copies(tasks[index], tasks[of], why) for index, (_, of, why) in sorted(best.items())]


def groups(tasks: Sequence[TaskRef], least: float) -> list[list[TaskRef]]:
    """The tasks in groups of those that count as one, directly or through others of the group; most hold one task."""
    import numpy as np

    label = np.arange(len(tasks))

    def unite(indices: "NDArray[np.intp]") -> None:
        label[np.isin(label, label[indices])] = label[indices].min()

    for equal in (*_by_content(tasks), *_by_grading(tasks)):
        unite(np.array(equal))
    for index, others, _ in _near(tasks, least):
        unite(np.append(others, index))
    found: dict[int, list[TaskRef]] = defaultdict(list)
    for index, task in enumerate(tasks):
        found[int(label[index])].append(task)
    return list(found.values())


def _by_content(tasks: Sequence[TaskRef]) -> list[list[int]]:
    return _equal((task.key, index) for index, task in enumerate(tasks))


def _by_grading(tasks: Sequence[TaskRef]) -> Iterator[list[int]]:
    """Tasks with the same tests, environment, and tables about them; environments are read only where tests agree."""
    for same_tests in _equal((tests_key(task), index) for index, task in enumerate(tasks)):
        yield from _equal((_environment_key(tasks[index]), index) for index in same_tests)


def _equal(keys: Iterable[tuple[str, int]]) -> list[list[int]]:
    """Indices in groups of one key; an empty key is like no other."""
    found: dict[str, list[int]] = defaultdict(list)
    for key, index in keys:
        if key:
            found[key].append(index)
    return [group for group in found.values() if len(group) > 1]


def _near(tasks: Sequence[TaskRef], least: float, first: int = 0) -> Iterator[Row]:
    """As `alike`, of instructions and tests both, the smaller likeness of the two.

    With `first`, tasks before that index are compared with those from it on, and with no others. Tests are read only
    of tasks whose instructions are alike.
    """
    import numpy as np

    told = {
        index: (others, likeness)
        for index, others, likeness in alike([runs(words(task.instruction)) for task in tasks], least)
    }
    if first:
        kept = {index: found[0] < first for index, found in told.items() if index >= first}
        told = {index: (told[index][0][keep], told[index][1][keep]) for index, keep in kept.items() if keep.any()}
    suspects = np.unique(np.concatenate([np.array(list(told), dtype=int), *(others for others, _ in told.values())]))
    for position, others, likeness in alike([runs(_tests_words(tasks[index])) for index in suspects], least):
        index = int(suspects[position])
        if index in told:
            both, of_told, of_tests = np.intersect1d(told[index][0], suspects[others], return_indices=True)
            if len(both):
                yield index, both, np.minimum(told[index][1][of_told], likeness[of_tests])


def tests_key(task: TaskRef) -> str:
    """Hash of the files that grade a task; empty when it has none."""
    return "\n".join(content_key(folder) for folder in _tests_folders(task.path))


def _tests_folders(folder: Path) -> list[Path]:
    return [path for path in (folder / "tests", *sorted(folder.glob("steps/*/tests"))) if path.is_dir()]


def _environment_key(task: TaskRef) -> str:
    folder = task.path / "environment"
    told = tomllib.loads((task.path / TASK_FILE).read_text(encoding="utf-8"))
    tables = json.dumps([told.get(name) for name in ("verifier", "environment", "steps")], default=str, sort_keys=True)
    return f"{content_key(folder) if folder.is_dir() else ''} {tables}"


def _tests_words(task: TaskRef) -> list[str]:
    files = [file for folder in _tests_folders(task.path) for file in sorted(folder.rglob("*")) if file.is_file()]
    return [word for file in files for word in _file_words(file.read_bytes())]


def _file_words(data: bytes) -> list[str]:
    try:
        text = data.decode("utf-8") if len(data) <= LONGEST_TEXT else None
    except UnicodeDecodeError:
        text = None
    return [hashlib.sha256(data).hexdigest()] if text is None else words(text, signs=True)
