"""Make Harbor tasks from questions of reasoning-gym: six of its generators, each question solved by one command.

    .tools/uv run --no-project --with reasoning-gym==0.1.25 tools/reasoning_gym_tasks.py [FOLDER]

writes up to 24 tasks for each generator to FOLDER, by default outputs/reasoning-gym. Questions and answers are
reasoning-gym's. The solution is a command from this file. If reasoning-gym's scorer rejects its result, the question is
left out. The verifier compares the agent's answer with reasoning-gym's.
"""

import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import reasoning_gym

QUESTIONS, SEED = 24, 7
"""Questions per generator, and reasoning-gym's seed."""
TASK = """version = "1.0"

[metadata]
category = "{category}"

[verifier]
timeout_sec = 60.0

[agent]
timeout_sec = 60.0

[environment]
cpus = 1
memory_mb = 512
"""
DOCKERFILE = "FROM debian:12-slim\nWORKDIR /app\n"
VERIFIER = """#!/bin/bash
if [ "$(cat /app/answer.txt)" = "{answer}" ]; then echo 1; else echo 0; fi > /logs/verifier/reward.txt
"""


@dataclass(frozen=True)
class Generator:
    """A generator of questions, and the command that answers one."""

    settings: dict[str, object]
    pattern: str
    """What the command needs of the question, without characters that a shell expands. Other questions are left out."""
    command: Callable[[re.Match[str]], str]


SHORT = {"min_terms": 2, "max_terms": 3, "min_digits": 1, "max_digits": 2}
ARITHMETIC = {"allow_parentheses": False, "operators": ["+", "-", "*"]}
MONTHS = "January|February|March|April|May|June|July|August|September|October|November|December"
GENERATORS = {
    "chain_sum": Generator(SHORT, r"problem: ([-+\d ]+) =", lambda found: f"echo $(({found[1]}))"),
    "basic_arithmetic": Generator(
        SHORT | ARITHMETIC, r"Calculate ([-+*\d ]+)\.", lambda found: f"echo $(({found[1]}))"
    ),
    "products": Generator(
        {"min_digits": 1, "max_digits": 2}, r"multiplication: ([*\d ]+)\.", lambda found: f"echo $(({found[1]}))"
    ),
    "spell_backward": Generator({}, r"\): (\w+)$", lambda found: f"echo {found[1]} | rev"),
    "calendar_arithmetic": Generator(
        {"tasks": ["weekday_of_date"]},
        rf"(?:{MONTHS}) \d+, \d+|\d\d/\d\d/\d{{4}}",
        lambda found: f'date -d "{found[0]}" +%A',
    ),
    "letter_counting": Generator(
        {"max_words": 6},
        r'letter "(\w)" appear in the text: "([^"$`\\]*)"',
        lambda found: f'echo "{found[2]}" | grep -io {found[1]} | wc -l',
    ),
}


def main() -> None:
    """Write the tasks, and print how many questions of each generator have one."""
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "outputs/reasoning-gym")
    for name, generator in GENERATORS.items():
        dataset, written = reasoning_gym.create_dataset(name, size=QUESTIONS, seed=SEED, **generator.settings), 0
        for number, entry in enumerate(dataset):
            question = entry["question"].strip()
            found = re.search(generator.pattern, question)
            if found and dataset.score_answer(output_of(command := generator.command(found)), entry) == 1.0:
                write_task(folder / f"{name.replace('_', '-')}-{number:02}", name, question, command, entry["answer"])
                written += 1
        print(f"{name}: {written} of {QUESTIONS} questions")


def output_of(command: str) -> str:
    """Run a command of this file in an empty folder, and return what it prints."""
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(["bash", "-c", command], cwd=folder, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def write_task(folder: Path, category: str, question: str, command: str, answer: str) -> None:
    """Write a task in Harbor's format."""
    files = {
        "task.toml": TASK.format(category=category),
        "instruction.md": f"{question}\nWrite the answer to answer.txt.\n",
        "environment/Dockerfile": DOCKERFILE,
        "solution/solve.sh": f"#!/bin/bash\n{command} > answer.txt\n",
        "tests/test.sh": VERIFIER.format(answer=answer),
    }
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
