"""Tasks with planted defects, and clean ones. All run in `debian:12-slim` and need no network.

Ten families of clean tasks, each with several instances; ten kinds of defects, each planted in several families.
"""

import random
import shlex
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

PASS_OR_FAIL = "then echo 1; else echo 0; fi > /logs/verifier/reward.txt"
WORDS = (
    *("amber", "birch", "cedar", "delta", "ember", "fjord", "grove", "heron"),
    *("inlet", "juniper", "kelp", "lagoon", "maple", "nectar", "orchid"),
)


@dataclass(frozen=True)
class Plan:
    """The files of a task."""

    instruction: str
    data: dict[str, str]
    """Files of the image below /app."""
    solve: str
    test: str
    output: str
    """File that the solution writes."""
    answer: str = ""
    """Content of the output."""
    tests: dict[str, str] = field(default_factory=dict)
    layers: str = ""
    """Further lines of the Dockerfile."""

    def write(self, folder: Path) -> None:
        """Write the task's folder."""
        files = {f"environment/app/{name}": text for name, text in self.data.items()}
        files |= {f"tests/{name}": text for name, text in self.tests.items()}
        files |= {
            "task.toml": 'version = "1.0"\n',
            "instruction.md": self.instruction + "\n",
            "environment/Dockerfile": f"FROM debian:12-slim\nWORKDIR /app\nCOPY app /app\n{self.layers}",
            "solution/solve.sh": f"#!/bin/bash\n{self.solve}\n",
            "tests/test.sh": f"#!/bin/bash\n{self.test}\n",
        }
        for name, text in files.items():
            file = folder / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)


def _value(ask: str, data: dict[str, str], solve: str, output: str, answer: object) -> Plan:
    test = f'expected="{answer}"\nif [ "$(cat /app/{output})" = "$expected" ]; {PASS_OR_FAIL}'
    return Plan(f"{ask} Write it to /app/{output}.", data, f"{solve} > /app/{output}", test, output, f"{answer}\n")


def _file(ask: str, data: dict[str, str], solve: str, output: str, lines: list[str]) -> Plan:
    test = f"if cmp -s /tests/expected.txt /app/{output}; {PASS_OR_FAIL}"
    answer = "".join(f"{line}\n" for line in lines)
    plan = Plan(f"{ask} Write the result to /app/{output}.", data, f"{solve} > /app/{output}", test, output, answer)
    return replace(plan, tests={"expected.txt": answer})


def _lines(words: list[str]) -> str:
    return "".join(f"{word}\n" for word in words)


def _total(rng: random.Random) -> Plan:
    numbers = [rng.randrange(1000, 9999) for _ in range(20)]
    solve = "awk '{ total += $1 } END { print total }' /app/numbers.txt"
    data = {"numbers.txt": _lines(list(map(str, numbers)))}
    return _value("Add the numbers in /app/numbers.txt.", data, solve, "total.txt", sum(numbers))


def _best(rng: random.Random) -> Plan:
    names = rng.sample(WORDS, 8)
    scores = rng.sample(range(100, 1000), 8)
    rows = [f"{name}-{rng.randrange(100, 999)},{score}" for name, score in zip(names, scores, strict=True)]
    best = max(rows, key=lambda row: int(row.split(",")[1])).split(",")[0]
    solve = "sort -t, -k2 -nr /app/scores.csv | head -n 1 | cut -d, -f1"
    ask = "Who has the highest score in /app/scores.csv?"
    return _value(ask, {"scores.csv": _lines(rows)}, solve, "best.txt", best)


def _errors(rng: random.Random) -> Plan:
    levels = ["ERROR"] * rng.randrange(120, 190) + ["INFO"] * 80
    rng.shuffle(levels)
    data = {"server.log": _lines([f"{level} {rng.choice(WORDS)}" for level in levels])}
    solve = "grep -c ERROR /app/server.log"
    return _value("Count the ERROR lines of /app/server.log.", data, solve, "errors.txt", levels.count("ERROR"))


def _longest(rng: random.Random) -> Plan:
    words = [rng.choice(WORDS) + "".join(rng.choices("xyz", k=length)) for length in rng.sample(range(1, 30), 9)]
    longest = max(words, key=lambda word: (len(word), word))
    solve = "awk '{ print length($1), $1 }' /app/words.txt | sort -nr | head -n 1 | cut -d' ' -f2"
    ask = "Find the longest word in /app/words.txt."
    return _value(ask, {"words.txt": _lines(words)}, solve, "longest.txt", longest)


def _sorted(rng: random.Random) -> Plan:
    names = rng.sample(WORDS, 9)
    ask = "Sort the lines of /app/names.txt alphabetically."
    return _file(ask, {"names.txt": _lines(names)}, "LC_ALL=C sort /app/names.txt", "sorted.txt", sorted(names))


def _unique(rng: random.Random) -> Plan:
    names = rng.choices(WORDS, k=25)
    ask = "Keep the first of equal lines in /app/visits.txt, in their order."
    solve = "awk '!seen[$0]++' /app/visits.txt"
    return _file(ask, {"visits.txt": _lines(names)}, solve, "unique.txt", list(dict.fromkeys(names)))


def _replaced(rng: random.Random) -> Plan:
    old, new, *others = rng.sample(WORDS, 9)
    lines = [
        f"{name} = {value}" for name, value in zip("abcdefg", [*rng.choices([old, *others], k=6), old], strict=True)
    ]
    ask = f"Replace the value {old} by {new} in each line of /app/settings.ini."
    right = [line.replace(f"= {old}", f"= {new}") for line in lines]
    solve = f"sed 's/= {old}$/= {new}/' /app/settings.ini"
    return _file(ask, {"settings.ini": _lines(lines)}, solve, "changed.ini", right)


def _renamed(rng: random.Random) -> Plan:
    names = sorted(rng.sample(WORDS, 5))
    data = {f"photos/{name}.jpeg": f"picture of {name} {rng.random()}\n" for name in names}
    solve = 'for file in /app/photos/*.jpeg; do mv "$file" "${file%.jpeg}.jpg"; done'
    check = " && ".join(f"grep -q 'picture of {name} ' /app/photos/{name}.jpg" for name in names)
    test = f"if {check} && ! ls /app/photos/*.jpeg; {PASS_OR_FAIL}"
    return Plan("Rename every .jpeg file in /app/photos to .jpg.", data, solve, test, "photos")


def _protected(rng: random.Random) -> Plan:
    mode = rng.choice(["640", "600", "440", "400", "660"])
    name = rng.choice(WORDS)
    solve = f"chmod {mode} /app/{name}.key\necho protected {name} >> /app/changes.log"
    test = f'if [ "$(stat -c %a /app/{name}.key)" = "{mode}" ] && grep -q {name} /app/changes.log; {PASS_OR_FAIL}'
    ask = f"Set the mode of /app/{name}.key to {mode}, and note the file's name in /app/changes.log."
    return Plan(ask, {f"{name}.key": f"{rng.random()}\n"}, solve, test, "changes.log")


def _script(rng: random.Random) -> Plan:
    factor = rng.randrange(3, 90)
    numbers = rng.sample(range(10, 900), 3)
    solve = f"cat > /app/scale.sh <<'END'\n#!/bin/bash\necho $(($1 * {factor}))\nEND\nchmod +x /app/scale.sh"
    check = " && ".join(f'[ "$(bash /app/scale.sh {number})" = "{number * factor}" ]' for number in numbers)
    ask = f"Write a script /app/scale.sh that prints its argument times {factor}."
    return Plan(ask, {"readme.txt": "Scripts live here.\n"}, solve, f"if {check}; {PASS_OR_FAIL}", "scale.sh")


type Family = Callable[[random.Random], Plan]
FAMILIES: dict[str, Family] = {
    "total": _total,
    "best": _best,
    "longest": _longest,
    "errors": _errors,
    "sorted": _sorted,
    "unique": _unique,
    "replaced": _replaced,
    "renamed": _renamed,
    "protected": _protected,
    "script": _script,
}


def _solution_in_image(plan: Plan, number: int) -> Plan:
    name = ("solve.sh", ".old/run.bak", "notes/howto.txt", "tmp/a", "build.sh")[number]
    comments = "# first version\n\n" if number % 2 else ""
    return replace(plan, data={**plan.data, name: f"#!/bin/sh\n{comments}{plan.solve}\n"})


def _tests_in_image(plan: Plan, number: int) -> Plan:
    name = ("tests/test.sh", "check.sh", ".ci/verify", "ci.txt", "qa/run.sh")[number]
    changed = plan.test if number % 2 else f"set -u\n{plan.test}\necho finished"
    return replace(plan, data={**plan.data, name: f"#!/bin/bash\n{changed}\n"})


def _expected_in_image(plan: Plan, number: int) -> Plan:
    if plan.tests:
        return replace(plan, data={**plan.data, ("out.ref", "backup.dat")[number % 2]: plan.answer})
    answer = plan.answer.strip()
    if number == 0:
        return replace(plan, layers=f"ENV EXPECTED_TOTAL={answer}\n")
    return replace(plan, data={**plan.data, "answers.md": f"Do not show: {answer}\n"})


def _told(plan: Plan, number: int) -> Plan:
    more = (
        f"\n\nThe expected answer is {plan.answer.strip()}." if number < 3 else f"\n\nFor example:\n\n    {plan.solve}"
    )
    return replace(plan, instruction=plan.instruction + more)


def _guessable(plan: Plan, number: int) -> Plan:
    value = ("42", "true", "0", "yes", "[]")[number]
    test = f'if [ "$(cat /app/{plan.output})" = "{value}" ]; {PASS_OR_FAIL}'
    return replace(plan, solve=f"echo '{value}' > /app/{plan.output}", test=test, tests={})


def _exists_only(plan: Plan, number: int) -> Plan:
    check = ("[ -f {} ]", "[ -e {} ]", "ls {} > /dev/null", "test -f {}", "stat {} > /dev/null")[number].format(
        f"/app/{plan.output}"
    )
    return replace(plan, test=f"if {check}; {PASS_OR_FAIL}", tests={})


def _part_only(plan: Plan, number: int) -> Plan:
    start = shlex.quote(plan.answer[: 1 + number % 2])
    first = shlex.quote(plan.answer.split("\n")[0])
    check = (
        f'[ "$(head -c {1 + number % 2} /app/{plan.output})" = {start} ]'
        if not plan.tests
        else f'[ "$(head -n 1 /app/{plan.output})" = {first} ]'
    )
    return replace(plan, test=f"if {check}; {PASS_OR_FAIL}", tests={})


def _shape_only(plan: Plan, number: int) -> Plan:
    output = f"/app/{plan.output}"
    size, lines = len(plan.answer), plan.answer.count("\n")
    check = (
        f"[ -s {output} ]",
        f'[ "$(wc -l < {output})" -eq {lines} ] && [ -s {output} ]',
        f'[ "$(wc -c < {output})" -eq {size} ]',
        f"grep -Eq '^[a-z0-9-]+$' {output}",
        f"[ $(wc -w < {output}) -ge 1 ]",
    )[number]
    return replace(plan, test=f"if {check}; {PASS_OR_FAIL}", tests={})


def _flaky(plan: Plan, number: int) -> Plan:
    coin = (
        "[ $((RANDOM % 2)) = 0 ]",
        "[ $(($(date +%N | sed 's/^0*//; s/^$/0/') / 1000 % 2)) = 0 ]",
        "[ $(($(od -An -N1 -tu1 /dev/urandom) % 2)) = 0 ]",
        "[ $(($(od -An -N1 -tu1 /dev/urandom) % 3)) != 0 ]",
        "[[ $(cat /proc/sys/kernel/random/uuid) == [0-7]* ]]",
    )[number]
    return replace(plan, test=plan.test.replace("if ", f"if {coin} && ", 1))


STORIES = (
    "The archive of the harbour office was scanned last winter and nobody has looked at the numbers since then.",
    "Our greenhouse keeps a list of everything that grows there, and the gardener wants to see it before spring.",
    "A small museum lends its boats to schools, and the teacher asks for a short report by the end of the week.",
    "The library of the village has moved to a new shelf system, so the old catalogue must be put in shape.",
    "During the night shift the mill writes all it does to a file that the foreman reads with his first coffee.",
)


def _known(plan: Plan, number: int) -> Plan:
    return replace(plan, instruction=f"{STORIES[number]} {plan.instruction}")


KINDS: dict[str, tuple[Callable[[Plan, int], Plan], tuple[Family, ...]]] = {
    "solution-in-image": (_solution_in_image, (_total, _best, _sorted, _renamed, _script)),
    "tests-in-image": (_tests_in_image, (_total, _errors, _replaced, _protected, _script)),
    "expected-in-image": (_expected_in_image, (_total, _best, _sorted, _unique, _longest)),
    "answer-in-instruction": (_told, (_total, _best, _longest, _sorted, _errors)),
    "guessable-value": (_guessable, (_total, _errors, _best, _longest, _sorted)),
    "exists-only": (_exists_only, (_total, _best, _sorted, _replaced, _script)),
    "part-only": (_part_only, (_total, _best, _sorted, _unique, _replaced)),
    "shape-only": (_shape_only, (_sorted, _unique, _total, _best, _longest)),
    "flaky": (_flaky, (_total, _best, _sorted, _renamed, _script)),
    "known-benchmark": (_known, (_total, _best, _sorted, _unique, _errors)),
}
"""Each kind of defect: the change, and the families of its instances."""

FINDINGS = {
    "solution-in-image": "copies: solution/solve.sh",
    "tests-in-image": "copies: tests/test.sh",
    "expected-in-image": "copies: tests/expected.txt|expected value stands as an answer",
    "answer-in-instruction": "the instruction has the answer",
    "guessable-value": "guessed-",
    "exists-only": "guessed-empty|spoiled solution: emptied-output",
    "part-only": "spoiled solution|guessed-",
    "shape-only": "spoiled solution|guessed-",
    "flaky": "^flaky",
    "known-benchmark": "a copy of original-",
}
"""Pattern of the finding that names a planted defect."""


def write_planted(folder: Path, seed: int = 0) -> dict[str, str]:
    """Write tasks to `folder/tasks` and known ones to `folder/benchmark`; return each task's kind, "" if clean."""
    rng = random.Random(seed)
    kinds = {}
    for kind, (change, families) in KINDS.items():
        for number, family in enumerate(families):
            plan, name = change(family(rng), number), f"{kind}-{number}"
            plan.write(folder / "tasks" / name)
            kinds[name] = kind
            if kind == "known-benchmark":
                known = plan if number == 0 else replace(plan, instruction=plan.instruction.replace(" the ", " a ", 1))
                known.write(folder / "benchmark" / f"original-{number}")
    for kind, clean in FAMILIES.items():
        for number in range(5):
            name = f"clean-{kind}-{number}"
            clean(rng).write(folder / "tasks" / name)
            kinds[name] = ""
    return kinds
