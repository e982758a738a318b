"""Layout rules that a test can check: module names, file length, untyped lines, paths named in docs."""

import io
import re
import tokenize
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src/harbortrainer"
MODULES = sorted(path for path in PACKAGE.rglob("*.py"))
MEANINGLESS = {"place", "settle", "facts", "pupil", "course", "guard", "choice", "helpers", "utils", "common", "misc"}


def code_without_strings(path: Path) -> str:
    """The names and operators of a module: no comments, no strings, no docstrings."""
    kinds = (tokenize.COMMENT, tokenize.STRING)
    lines = io.StringIO(path.read_text(encoding="utf-8"))
    words: dict[int, list[str]] = {}
    for token in tokenize.generate_tokens(lines.readline):
        if token.type not in kinds:
            words.setdefault(token.start[0], []).append(token.string)
    return "\n".join(" ".join(line) for line in words.values())


def test_module_names_are_meaningful() -> None:
    assert [path.stem for path in MODULES if path.stem in MEANINGLESS] == []


def test_at_most_40_lines_use_any() -> None:
    lines = [line for path in MODULES for line in code_without_strings(path).splitlines()]
    assert sum(bool(re.search(r"\bAny\b", line)) for line in lines) <= 40


def test_the_training_loop_has_at_most_200_lines() -> None:
    loop = (PACKAGE / "engines/local/train.py").read_text(encoding="utf-8")
    assert len(loop.splitlines()) <= 200


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_file_has_at_most_400_lines(path: Path) -> None:
    assert len(path.read_text(encoding="utf-8").splitlines()) <= 400


@pytest.mark.parametrize("page", ["docs/design.md", "CONTRIBUTING.md"])
def test_files_named_in_developer_docs_exist(page: str) -> None:
    named = re.findall(r"`((?:[a-z_]+/)+[a-z_]+\.(?:py|toml|md))`", (ROOT / page).read_text(encoding="utf-8"))
    roots = (PACKAGE, PACKAGE / "engines/local", ROOT)
    assert [name for name in named if not any((root / name).is_file() for root in roots)] == []
    assert len(named) > 10


def test_design_page_names_modules_with_private_apis() -> None:
    users = [
        path.relative_to(PACKAGE) for path in MODULES if re.search(r"= PrivateApi\(", path.read_text(encoding="utf-8"))
    ]
    named = (
        (ROOT / "docs/design.md").read_text(encoding="utf-8").partition("**Private APIs.**")[2].partition("\n## ")[0]
    )
    places = {"harbor_compat/" if user.parts[0] == "harbor_compat" else user.as_posix() for user in users}
    assert len(places) > 5
    assert sorted(place for place in places if f"`{place}`" not in named) == []


@pytest.mark.parametrize("folder", [".ci", "tools"])
def test_scripts_name_no_package_mirror(folder: str) -> None:
    for path in (ROOT / folder).iterdir():
        if path.is_file():
            assert not re.search(r"https?://[\w.-]+", path.read_text(encoding="utf-8")), path
