"""Static part of an audit: answers and graders in files that the agent can read, and guesses worth a trial.

A task's files are untrusted: nothing of them runs here, and at most `MAX_FILES` files of `MAX_FILE_BYTES` are read.
The search is textual, so a finding is a reason to read the task, and no proof.
"""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from harbortrainer.tasks.near_duplicates import word_ngrams, words
from harbortrainer.tasks.task_errors import read_text
from harbortrainer.tasks.task_folder import TaskRef
from harbortrainer.tasks.verdict import Finding, note, weak

MAX_FILES, MAX_FILE_BYTES = 2000, 1 << 20
MAX_GUESSES, MAX_GUESSED_FILES, MAX_NAMED = 4, 20, 3
MIN_COPY, MIN_NGRAMS, COPIED_SHARE = 24, 20, 0.9
"""Fewest characters of a copied file; fewest trigrams of a near copy, and the share of them that it has."""

_ANSWER_WORD = re.compile(r"answer|expected|solution|golden|ground.?truth|oracle", re.IGNORECASE)
_CODE = re.compile(
    r"\.(?:py|sh|bash|[jt]sx?|rb|go|rs|java|kts?|swift|c|h|cc|[ch]pp|cs|php|pl|lua|scala|hs|jl|cbl|f90|sql|tf)$"
)
_EXAMPLE = re.compile(r"sample|example|template", re.IGNORECASE)
_TEST_CODE = re.compile(rf"(?i:test|spec|check|verif|grade|judge).*{_CODE.pattern}")
_NO_ANSWER = ("Dockerfile", ".dockerignore", "__init__.py", "docker-compose.yaml", "docker-compose.yml")
_COMPARED = (
    re.compile(r"[=!]=\s*[rbf]?([\"'])(?P<value>[^\"'\n]+?)\1"),
    re.compile(r"([\"'])(?P<value>[^\"'\n]+?)\1\s*[=!]="),
    re.compile(r"[=!]=\s*(?P<value>-?\d+(?:\.\d+)?)\b"),
    re.compile(r"\bassert(?:Equal|_equal)s?\([^\n]*,\s*([\"']?)(?P<value>[^\"'\n,()]+)\1\s*\)"),
    re.compile(r"\b(?i:expected|answer)\w*\s*=\s*([\"']?)(?P<value>[^\"'\n\s$(\[{]+)\1\s*$", re.MULTILINE),
    re.compile(r"\s!?==?\s+([\"']?)(?P<value>[^\s\"'$\]]+)\1\s*\]"),
    re.compile(r"\s!?==?\s+([\"'])(?P<value>[^\"'\n$]+)\1\s*\]"),
    re.compile(r"\bgrep\s+-\w*[qx]\w*\s+(?:--\s+)?([\"']?)(?P<value>[^\"'\n\s|]+)\1\s"),
    re.compile(r"\b(?:echo|printf)\s+([\"']?)(?P<value>[^\"'\n|;]+?)(?:\\n)?\1\s*\|\s*(?:cmp|diff)\b"),
)
"""Comparisons with a constant in Python, JavaScript and shells."""
_COMMON = {"true", "false", "yes", "no", "ok", "pass", "passed", "done", "success", "hello", "none", "null", "[]", "{}"}
_COMMON |= {str(number) for number in (*range(11), 42, 100)}
"""Values that a policy tries without work."""
_PATH = re.compile(r"(?<![\w./:$}~*-])/(?:[\w.-]+/)*[\w.-]*\w")
_FILE = re.compile(r"(?<![\w./-])[\w-]+\.(?:txt|json|csv|tsv|md|log|html|xml|ya?ml|out|dat)\b")
_NOT_THE_AGENTS = re.compile(r"/(?:tests|logs|solution|bin|sbin|usr|etc|lib\w*|proc|dev|sys|run|boot)(?:/|$)")
_RUN = re.compile(rf"\b(?:python[\d.]*|bash|sh|node|perl|ruby|pytest)(?: -\S+)* [\"']?({_PATH.pattern})")
_GRADER = re.compile(
    r"(?:^|[_.-])(?:tests?|check(?:s|er)?|verif(?:y|ier)|grad(?:e|er|ing)|judge|scor(?:e|er|ing)|reward)(?:[_.-]|$)",
    re.IGNORECASE,
)
_ELAPSED = re.compile(r"\b(\w+)\s*=\s*\(?time\.(?:time|monotonic|perf_counter)\(\)\s*-")
_LIMITED = re.compile(r"\bassert\s+(\w+)\s*<")


@dataclass(frozen=True)
class TextFile:
    """A text file of a task."""

    name: str
    """Path within the task."""
    text: str

    @cached_property
    def code(self) -> str:
        """The words of the file without comment lines."""
        return _without_comments(self.text)

    @cached_property
    def ngrams(self) -> set[int]:
        """The trigrams of the file's words and signs."""
        return word_ngrams(words(self.text, signs=True))


@dataclass(frozen=True)
class AuditedFiles:
    """The texts of a task that an audit compares."""

    instruction: str
    tests: list[TextFile]
    solution: list[TextFile]
    environment: list[TextFile]
    """Files of the image's build context, and the Dockerfile, whose lines are layers of the image."""

    @property
    def dockerfile(self) -> str:
        """Words of the Dockerfile; empty without one, so that nothing is known of the image."""
        return " ".join(file.code for file in self.environment if Path(file.name).name == "Dockerfile")

    @property
    def values(self) -> list[str]:
        """Constants that the tests compare with, in order."""
        found = [
            match["value"].strip()
            for file in self.tests
            for pattern in _COMPARED
            for match in pattern.finditer(file.text)
        ]
        return list(dict.fromkeys(value for value in found if value and not value.startswith(("/", "__", "-"))))


def read_files(task: TaskRef) -> AuditedFiles:
    """Read the texts of a task; binary, linked and long files are left out."""
    tests, solution, environment = (list(_texts(task.path, part)) for part in ("tests", "solution", "environment"))
    return AuditedFiles(task.instruction, tests, solution, environment)


def _texts(task: Path, part: str) -> Iterator[TextFile]:
    folders = [task / part, *sorted(task.glob(f"steps/*/{part}"))]
    files = [file for folder in folders if folder.is_dir() for file in sorted(folder.rglob("*"))]
    for file in files[:MAX_FILES]:
        try:
            if not file.is_symlink() and file.is_file() and file.stat().st_size <= MAX_FILE_BYTES:
                yield TextFile(str(file.relative_to(task)), read_text(file))
        except (OSError, UnicodeDecodeError):
            continue


def static_findings(files: AuditedFiles) -> list[Finding]:
    """Return the findings of all searches: readable answers, graders in the image, and tests of a running time."""
    found = readable_answers(files)
    if graders := _graders_in_image(files):
        found.append(weak("verifier", f"the tests run a grader of the image: {', '.join(graders[:MAX_NAMED])}"))
    if timed := [file.name for file in files.tests if {*_ELAPSED.findall(file.text)} & {*_LIMITED.findall(file.text)}]:
        what = "limits a running time, so the reward depends on the machine's load"
        found.append(note("verifier", f"{', '.join(timed[:MAX_NAMED])} {what}"))
    return found


def _graders_in_image(files: AuditedFiles) -> list[str]:
    """Return the graders that the shell scripts of the tests run, and the agent can read or change.

    Python tests are left out, since other tests beside a grader can catch its change. A program that the instruction
    names is the agent's work, and one that the tests bring replaces the image's.
    """
    if not files.dockerfile:
        return []
    scripts = " ".join(file.code for file in files.tests if file.name.endswith(".sh"))
    image, own = ({Path(file.name).name for file in part} for part in (files.environment, files.tests))
    run = {path: Path(path).name for path in _RUN.findall(scripts) if not _NOT_THE_AGENTS.match(path)}
    return sorted(
        path
        for path, name in run.items()
        if name in image - own and _GRADER.search(name) and name not in files.instruction
    )


def readable_answers(files: AuditedFiles) -> list[Finding]:
    """Return the findings on answers in text that the agent can read."""
    copied = {file.name: of.name for of in _secrets(files) for file in files.environment if _is_copy(of, file)}
    found = []
    if copied:
        pairs = ", ".join(f"{of} ({name})" for name, of in list(copied.items())[:MAX_NAMED])
        more = f" and {len(copied) - MAX_NAMED} more" if len(copied) > MAX_NAMED else ""
        found.append(weak("task", f"the image may have copies: {pairs}{more}"))
    if named := sorted({file.name for file in files.environment if file.name not in copied and _names(file, files)}):
        found.append(weak("task", f"an expected value stands as an answer in {', '.join(named[:MAX_NAMED])}"))
    if kept := _kept_in_image(files):
        found.append(weak("task", f"the tests read an answer of the image: {', '.join(kept[:MAX_NAMED])}"))
    if _tells(files.instruction, [value for value in files.values if _is_specific(value)]) or any(
        file.code in _without_comments(files.instruction) for file in files.solution if len(file.code) >= MIN_COPY
    ):
        found.append(weak("task", "the instruction has the answer"))
    elif (values := files.values) and all(value in files.instruction for value in values):
        found.append(note("task", "each value that the tests compare with stands in the instruction"))
    return found


def _kept_in_image(files: AuditedFiles) -> list[str]:
    """Return the answer files that the tests read, and that the image has. The instruction names none of them.

    A file of that name is copied into the image, or the Dockerfile or a script that it names makes the file.
    """
    if not (dockerfile := files.dockerfile):
        return []
    copied = {Path(file.name).name for file in files.environment}
    made = " ".join([dockerfile, *(file.code for file in files.environment if Path(file.name).name in dockerfile)])
    tests = " ".join(file.code for file in files.tests)
    read = {path: Path(path).name for path in _PATH.findall(tests) if not _NOT_THE_AGENTS.match(path)}
    written = {*_PATH.findall(made)}
    return sorted(
        path
        for path, name in read.items()
        if (name in copied or path in written)
        and _ANSWER_WORD.search(name)
        and not (_CODE.search(name) or _EXAMPLE.search(name) or name in files.instruction)
    )


def _secrets(files: AuditedFiles) -> list[TextFile]:
    """Files that the agent must not have: the solution, test code, and files with expected results."""
    tests = [file for file in files.tests if _CODE.search(file.name) or _ANSWER_WORD.search(Path(file.name).name)]
    return [file for file in (*files.solution, *tests) if not file.name.endswith(_NO_ANSWER)]


def _is_copy(secret: TextFile, file: TextFile) -> bool:
    """Whether a file has all code of a secret one, or nearly all words of test code.

    A solution often has files of the image, some of them with a changed line. So near copies of it mean nothing, and
    equal files of one name neither. The same is true of a reference beside the tests: code that tests nothing.
    """
    name = Path(secret.name).name
    part = next(folder for folder in Path(secret.name).parts if folder in {"solution", "tests"})
    test_code = part == "tests" and _TEST_CODE.search(name) is not None
    reference = part == "solution" or (_CODE.search(name) and not test_code)
    if reference and name == Path(file.name).name and not name.startswith("solve."):
        return False
    if Path(file.name).name in _NO_ANSWER and Path(file.name).name != "Dockerfile":
        return False
    code = secret.code
    if len(code) >= MIN_COPY and code in file.code:
        return True
    if _ANSWER_WORD.search(name) and len(code) > 3 and code == file.code:
        return True
    if not test_code:
        return False
    fewest = max(MIN_NGRAMS, COPIED_SHARE * len(secret.ngrams))
    return len(secret.ngrams & file.ngrams) >= fewest


def _without_comments(text: str) -> str:
    """Return the words of a text without comment lines."""
    return " ".join(word for line in text.split("\n") if not line.lstrip().startswith("#") for word in line.split())


def _names(file: TextFile, files: AuditedFiles) -> bool:
    """Whether a file of the image names an expected value as an answer, by its own name or in the same line.

    A value or a file that the instruction names is no secret; a file is named with its folder. Examples show a format.
    The name of source code says what it is for.
    """
    values = [value for value in files.values if _is_specific(value) and value not in files.instruction]
    name = Path(file.name).name
    if not _ANSWER_WORD.search(name) or _CODE.search(name):
        return _tells(file.text, values)
    known = "/".join(Path(file.name).parts[-2:]) in files.instruction or _EXAMPLE.search(file.name)
    return not known and any(value in file.text for value in values)


def _tells(text: str, values: list[str]) -> bool:
    lines = [line for line in text.split("\n") if _ANSWER_WORD.search(line)]
    return any(_states(line, value) for line in lines for value in values)


def _states(line: str, value: str) -> bool:
    """Whether a line names a value as an answer, as in `the answer is 4711` or `EXPECTED=4711`."""
    stated = rf"(?:{_ANSWER_WORD.pattern})[^\n=:]{{0,40}}?(?:\bis|\bare|[=:])\s*[`\"'*]*{re.escape(value)}(?!\w)"
    return re.search(stated, line, re.IGNORECASE) is not None


def _is_specific(value: str) -> bool:
    """Whether a value is unlikely to occur by chance: long, or of four digits or more."""
    return len(value) >= 8 or sum(map(str.isdigit, value)) >= 4


def guesses(files: AuditedFiles) -> dict[str, str]:
    """Return scripts that write a constant to each file that the tests or the instruction name, by name of the guess.

    An empty file and 1 are always guessed; other common values only if the tests compare with them.
    """
    text = "\n".join([files.instruction, *(file.text for file in files.tests)])
    absolute = {path for path in _PATH.findall(text) if not _NOT_THE_AGENTS.match(path)}
    named = sorted({*absolute, *_FILE.findall(text)}, key=lambda name: (-name.count("/"), name))[:MAX_GUESSED_FILES]
    compared = [value for value in files.values if value.lower() in _COMMON]
    values = list(dict.fromkeys([*compared[: MAX_GUESSES - 2], "1"]))
    return {f"guessed-{value or 'empty'}": _guess(named, value) for value in ("", *values)} if named else {}


def _guess(files: list[str], value: str) -> str:
    write = f"printf '%s\\n' {shlex.quote(value)}" if value else ":"
    return (
        f"for file in {' '.join(map(shlex.quote, files))}; do "
        f'[ -e "$file" ] || {{ mkdir -p "$(dirname "$file")" && {write} > "$file"; }}; done; true'
    )
