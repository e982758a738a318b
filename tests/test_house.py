"""The rules of the house that a machine can hold: unique names, few files, few untyped lines, floors."""

import ast
import io
import re
import tokenize
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src/harbortrainer"
MODULES = sorted(path for path in PACKAGE.rglob("*.py"))
SAYS_NOTHING = {"place", "settle", "facts", "pupil", "course", "guard", "choice", "helpers", "utils", "common", "misc"}


def code_without_strings(path: Path) -> str:
    """The names and operators of a module: no comments, no strings, no docstrings."""
    kinds = (tokenize.COMMENT, tokenize.STRING)
    lines = io.StringIO(path.read_text(encoding="utf-8"))
    words: dict[int, list[str]] = {}
    for token in tokenize.generate_tokens(lines.readline):
        if token.type not in kinds:
            words.setdefault(token.start[0], []).append(token.string)
    return "\n".join(" ".join(line) for line in words.values())


def test_no_two_modules_share_a_name() -> None:
    names = Counter(path.stem for path in MODULES if path.stem not in ("__init__", "__main__"))
    assert [name for name, count in names.items() if count > 1] == []


def test_no_two_classes_share_a_name() -> None:
    names = Counter(
        node.name
        for path in MODULES
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ClassDef)
    )
    assert [name for name, count in names.items() if count > 1] == []


def test_every_module_is_called_by_a_word_that_says_something() -> None:
    assert [path.stem for path in MODULES if path.stem in SAYS_NOTHING] == []


def test_at_most_forty_lines_are_untyped() -> None:
    lines = [line for path in MODULES for line in code_without_strings(path).splitlines()]
    assert sum(bool(re.search(r"\bAny\b", line)) for line in lines) <= 40


def test_the_loop_fits_on_one_screen_and_its_engine_in_40_files() -> None:
    loop = (PACKAGE / "engines/local/train.py").read_text(encoding="utf-8")
    assert len(loop.splitlines()) <= 200
    assert len(list((PACKAGE / "engines/local").rglob("*.py"))) <= 40


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_no_file_is_two_things(path: Path) -> None:
    assert len(path.read_text(encoding="utf-8").splitlines()) <= 400


def knows_of_the_reward(path: Path) -> bool:
    """Whether the code of a module names a reward or an advantage, as a name or as a key."""
    words = {"reward", "rewards", "advantage", "advantages"}
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        named = [getattr(node, field, None) for field in ("id", "attr", "arg", "name", "value")]
        if words & {word for word in named if isinstance(word, str)}:
            return True
    return False


def test_the_way_of_a_reward_is_as_it_is_drawn_and_passes_at_most_twelve_files_that_know_of_it() -> None:
    rooms = ("trials", "environment", "engines/local")
    knowing = {path for room in rooms for path in (PACKAGE / room).rglob("*.py") if knows_of_the_reward(path)}
    aside = ("evaluation.py", "step_metrics.py", "rollouts/curriculum.py", "rollouts/difficulty_pools.py")
    looks = {PACKAGE / "engines/local" / name for name in aside}
    way = (ROOT / "docs/design.md").read_text(encoding="utf-8").split("## The way of one ")[1]
    drawn = {PACKAGE / name for name in re.findall(r"^\| `([^`]+)` \|", way, re.MULTILINE)}
    assert knowing - looks == drawn, "draw a new one in docs/design.md, or say above that it only looks"
    assert len(drawn) <= 12


@pytest.mark.parametrize("page", ["docs/design.md", "CONTRIBUTING.md"])
def test_the_pages_of_the_house_name_files_that_are_there(page: str) -> None:
    named = re.findall(r"`((?:[a-z_]+/)+[a-z_]+\.(?:py|toml|md))`", (ROOT / page).read_text(encoding="utf-8"))
    roots = (PACKAGE, PACKAGE / "engines/local", ROOT)
    assert [name for name in named if not any((root / name).is_file() for root in roots)] == []
    assert len(named) > 10


@pytest.mark.parametrize("folder", [".ci", "tools"])
def test_the_scripts_name_no_package_mirror(folder: str) -> None:
    for path in (ROOT / folder).iterdir():
        if path.is_file():
            assert not re.search(r"https?://[\w.-]+", path.read_text(encoding="utf-8")), path
