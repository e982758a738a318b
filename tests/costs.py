"""Mark each test by its cost: `pure`, `torch` or `process`.

The mark follows from the folder of the test file and from its imports: those of the helpers in `tests/` too and, for
torch, those of the package. It is enforced: a `pure` test that starts a process or loads torch fails. A file whose
imports do not show that sets `pytestmark = pytest.mark.process`.
"""

import ast
import functools
import re
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
ROOTS = (TESTS, TESTS.parent / "src", TESTS.parent / "benchmarks", TESTS.parent / "tools")
COSTS = ("pure", "torch", "process")
TORCH = {"torch", "transformers", "peft"}
PROCESS = {"subprocess", "multiprocessing", "pty"}
PROCESS_FOLDERS = {"e2e", "parity", "prime_rl", "sandbox", "security"}
LONG = re.compile(r"mark\.(?:long|docker)\b")
LONG_FIXTURE = re.compile(r"\benvironment_type\b(?!=)")
"""A fixture of `conftest.py` with a parameter that is marked `docker`."""
STARTS = {"subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn"}


@functools.cache
def _file_of(module: str) -> Path | None:
    paths = (root.joinpath(*module.split(".")) for root in ROOTS)
    files = (file for path in paths for file in (path.with_suffix(".py"), path / "__init__.py"))
    return next((file for file in files if file.is_file()), None)


@functools.cache
def _imports(file: Path) -> frozenset[str]:
    """Modules that a file imports: for a test or helper anywhere in it, for the rest when it is loaded."""
    tree = ast.parse(file.read_bytes())
    found: set[str] = set()
    for node in ast.walk(tree) if TESTS in file.parents else tree.body:
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.update({node.module, *(f"{node.module}.{alias.name}" for alias in node.names)})
    return frozenset(found)


@functools.cache
def _reachable(file: Path, helpers_only: bool) -> frozenset[str]:
    """Modules imported by a file and by the files it imports; with `helpers_only`, files in `tests/` alone."""
    found: set[str] = set()
    seen: set[Path] = set()
    todo = [file]
    while todo:
        current = todo.pop()
        seen.add(current)
        names = _imports(current)
        found |= names
        files = {inner for name in names if (inner := _file_of(name)) and (TESTS in inner.parents or not helpers_only)}
        todo += files - seen
    return frozenset(name.split(".")[0] for name in found)


@functools.cache
def cost_of(file: Path) -> str:
    """Return the mark of a test file."""
    if file.parent.name in PROCESS_FOLDERS or _reachable(file, helpers_only=True) & PROCESS:
        return "process"
    return "torch" if _reachable(file, helpers_only=False) & TORCH else "pure"


_pure_file: list[str] = []


def _is_version_of_verifiers(event: str, arguments: tuple[object, ...]) -> bool:
    """Verifiers runs git once a process, for the version on its first trace."""
    command = arguments[1] if event == "subprocess.Popen" else None
    return isinstance(command, list) and command[:2] == ["git", "-C"] and command[3:4] == ["rev-parse"]


def _refuse(event: str, arguments: tuple[object, ...]) -> None:
    if not _pure_file or _is_version_of_verifiers(event, arguments):
        return
    if event in STARTS or (event == "import" and arguments[0] == "torch"):
        what = "loads torch" if event == "import" else f"starts a process ({event})"
        mark = "torch" if event == "import" else "process"
        file = _pure_file.pop()
        pytest.fail(f"{file} is marked pure and {what}: set pytestmark = pytest.mark.{mark} in it")


@functools.cache
def may_be_long(file: Path) -> bool:
    """Whether a test file, or a file in `tests/` that it imports, names a mark of long tests."""
    text = file.read_text(encoding="utf-8")
    if LONG.search(text) or (file.match("test_*.py") and LONG_FIXTURE.search(text)):
        return True
    helpers = {inner for name in _imports(file) if (inner := _file_of(name)) and TESTS in inner.parents}
    return any(LONG.search(helper.read_text(encoding="utf-8")) for helper in helpers)


def is_left_out(file: Path, chosen: str) -> bool:
    """Whether `-m chosen` needs no test of a file, so that it is not imported: torch alone takes ten seconds."""
    if not file.match("test_*.py"):
        return False
    if chosen == "long":
        return not may_be_long(file)
    if chosen not in COSTS:
        return False
    return cost_of(file) != chosen and f"pytest.mark.{chosen}" not in file.read_text(encoding="utf-8")


def mark(items: list[pytest.Item]) -> None:
    """Give each test the mark of its file, unless it has one of these marks already."""
    for item in items:
        if not any(item.get_closest_marker(cost) for cost in COSTS):
            item.add_marker(cost_of(item.path))


def enforce(item: pytest.Item | None) -> None:
    """Refuse processes and torch while a pure test runs; None ends it."""
    _pure_file.clear()
    if item is not None and item.get_closest_marker("pure"):
        _pure_file.append(item.nodeid.split("::")[0])


sys.addaudithook(_refuse)
