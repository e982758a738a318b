"""The quickstart's family of tasks: read a file, apply one operation to its lines, write another file.

    python datasets/quickstart/make_tasks.py [FOLDER]

writes `train/` (8 tasks, one for each operation) and `heldout/` (32 tasks, four for each operation, with other files)
next to this script. The result depends only on this file. `variants()` returns every member of the family, and
`make_policy()` trains a policy on the members that are not held out.
"""

from __future__ import annotations

import itertools
import random
import shlex
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from harbortrainer.config.run_sections import WarmupConfig
    from harbortrainer.runs.display import Display

SOURCES = ["apple", "cherry", "grape", "lemon", "mango", "olive", "peach", "plum"]
TARGETS = ["amber", "bronze", "coral", "ivory", "jade", "pearl", "ruby", "silver"]
WORDS = [
    *("ant", "bear", "crow", "deer", "elk", "frog", "goat", "hare", "ibis", "jay"),
    *("kite", "lynx", "mole", "newt", "owl", "pony", "quail", "rook", "seal", "toad"),
]
COPY = "cp {source} {target}"
COPY_SHARE = 0.7
"""Share of the mistakes that only copy the file."""


@dataclass(frozen=True)
class Operation:
    """An operation: its words in the instruction, its command, and its result."""

    name: str
    phrase: str
    command: str
    result: Callable[[list[str]], list[str]]


OPERATIONS = [
    Operation("sort", "sort its lines", "sort {source} > {target}", sorted),
    Operation("unique", "keep each line once, sorted", "sort -u {source} > {target}", lambda x: sorted(set(x))),
    Operation("reverse", "reverse the order of its lines", "tac {source} > {target}", lambda x: x[::-1]),
    Operation(
        "upper", "make every letter upper case", "tr a-z A-Z < {source} > {target}", lambda x: [w.upper() for w in x]
    ),
    Operation("count", "count its lines", "wc -l < {source} > {target}", lambda x: [str(len(x))]),
    Operation("first", "take its first line", "head -n 1 {source} > {target}", lambda x: x[:1]),
    Operation("last", "take its last line", "tail -n 1 {source} > {target}", lambda x: x[-1:]),
    Operation("join", "join its lines with commas", "paste -sd, {source} > {target}", lambda x: [",".join(x)]),
]


@dataclass(frozen=True)
class Variant:
    """One member of the family."""

    operation: Operation
    source: str
    target: str

    @property
    def name(self) -> str:
        return f"{self.operation.name}-{self.source}-{self.target}"

    @property
    def instruction(self) -> str:
        return f"Read {self.source}.txt, {self.operation.phrase}, and write the result to {self.target}.txt.\n"

    @property
    def commands(self) -> list[str]:
        return [self._command(self.operation.command)]

    def mistake(self, rng: random.Random) -> list[str]:
        """Return commands that run but do not solve the task: mostly a copy, else another operation's commands."""
        if rng.random() < COPY_SHARE:
            return [self._command(COPY)]
        return [self._command(rng.choice([op.command for op in OPERATIONS if op is not self.operation]))]

    def _command(self, template: str) -> str:
        return template.format(source=f"{self.source}.txt", target=f"{self.target}.txt")

    def files(self) -> dict[str, str]:
        """Return the task's files in Harbor's format: content by path inside the task's folder."""
        return {
            "task.toml": TASK_TOML,
            "instruction.md": self.instruction,
            "environment/Dockerfile": dockerfile(),
            "solution/solve.sh": "\n".join(["#!/bin/sh", "cd /app", *self.commands, ""]),
            "tests/test.sh": self._test(),
        }

    def _test(self) -> str:
        expected = "".join(f"{line}\\n" for line in self.operation.result(content()[self.source]))
        return TEST_SH.format(target=f"/app/{self.target}.txt", expected=expected)

    def write(self, folder: Path) -> Path:
        """Write the task to `folder/<name>` and return that path."""
        for path, text in self.files().items():
            file = folder / self.name / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
            if file.suffix == ".sh":
                file.chmod(0o755)
        return folder / self.name


def content() -> dict[str, list[str]]:
    """Return the lines of every source file. No two pairs of operation and file have the same result."""
    rng = random.Random(0)
    while True:
        ends = rng.sample(WORDS, 2 * len(SOURCES))
        files = {source: _lines(rng, 5 + i, ends[i], ends[-1 - i]) for i, source in enumerate(SOURCES)}
        results = [tuple(do(lines)) for do in (list, *(op.result for op in OPERATIONS)) for lines in files.values()]
        if len(set(results)) == len(results):
            return files


def _lines(rng: random.Random, n: int, first: str, last: str) -> list[str]:
    middle = [first, *rng.sample(WORDS, n - 3)]
    rng.shuffle(middle)
    return [first, *middle, last]


def dockerfile() -> str:
    """Return the Dockerfile, which all tasks share, so that a sandbox builds one layer for all of them."""
    lines = ["# A plain prompt, and the files of the family.", "FROM debian:bookworm-slim", "WORKDIR /app"]
    lines.append("RUN echo \"PS1='$ '\" > ~/.bash_profile \\")
    writes = []
    for source, words in content().items():
        writes.append(f"    && printf '%s\\n' {shlex.join(words)} > {source}.txt")
    return "\n".join(lines) + "\n" + " \\\n".join(writes) + "\n"


TASK_TOML = """\
version = "1.0"

[metadata]
difficulty = "easy"
category = "file-operations"
tags = ["quickstart"]

[agent]
timeout_sec = 60.0

[verifier]
timeout_sec = 30.0

[environment]
network_mode = "no-network"
cpus = 1
memory_mb = 512
storage_mb = 256
"""

TEST_SH = """\
#!/bin/bash
# 1 when the file holds exactly what was asked for, else 0. The shell compares by itself: an agent can replace cmp.
if ! IFS= read -rd '' content < {target} && [[ $content == $'{expected}' ]]; then reward=1; else reward=0; fi
echo "$reward" > /logs/verifier/reward.txt
"""


def variants() -> list[Variant]:
    """Return every member of the family, held out or not, in a fixed order."""
    return [Variant(*parts) for parts in itertools.product(OPERATIONS, SOURCES, TARGETS)]


def splits(*, train: int = 1, heldout: int = 4, seed: int = 1) -> dict[str, list[Variant]]:
    """Return `train` variants of each operation, and `heldout` others of each.

    With one training task of each operation, a policy can learn the file's name in place of reading it.
    """
    rng = random.Random(seed)
    found: dict[str, list[Variant]] = {"train": [], "heldout": []}
    for operation in OPERATIONS:
        chosen = rng.sample([v for v in variants() if v.operation is operation], train + heldout)
        found["train"].extend(chosen[:train])
        found["heldout"].extend(chosen[train:])
    return found


def make_policy(config: WarmupConfig, folder: Path, *, seed: int, display: Display) -> None:
    """Write a policy that solves the share `config.success` of the family to `folder`. `[warmup]` calls this."""
    from tiny_policy import warm_up

    warm_up.make_policy(variants(), config, folder, seed=seed, display=display)


def main(folder: Path) -> None:
    for split, members in splits().items():
        for variant in members:
            variant.write(folder / split)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent)
