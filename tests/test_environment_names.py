"""Only `sandbox/` and `config/` compare environment types by name or class; other modules read the type's entry."""

import ast
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
from harbor.environments.factory import import_symbol
from harbor.models.environment_type import EnvironmentType

from harbortrainer.config.environment_table import AUTO, ENVIRONMENT_TYPES

PACKAGE = Path(__file__).parents[1] / "src/harbortrainer"
MODULES = sorted(
    path for path in PACKAGE.rglob("*.py") if path.relative_to(PACKAGE).parts[0] not in ("sandbox", "config")
)
NAMES = {*ENVIRONMENT_TYPES, *(member.value for member in EnvironmentType)}
OTHER_THINGS = {
    "local": {"engine", "requested"},
    AUTO: {"requested", "device", "dtype", "setting", "table", "tool_choice", "reasoning_parser"},
}
"""Names with other meanings too, and the variables that hold those: engines, devices, settings, chat formats."""


def environment_classes() -> set[str]:
    """Return the classes of the registered types and their bases, including Harbor's."""
    classes = [import_symbol(entry.import_path) for entry in ENVIRONMENT_TYPES.values() if entry.import_path]
    return {base.__name__ for cls in classes for base in cls.__mro__ if base.__module__ not in ("abc", "builtins")}


CLASSES = environment_classes()


def identifiers(node: ast.AST) -> set[str]:
    """Return the names and attributes in an expression."""
    found = {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}
    return found | {part.attr for part in ast.walk(node) if isinstance(part, ast.Attribute)}


def names_in(*nodes: ast.AST) -> set[str]:
    """Return the environment types that operands name, alone or in a list."""
    named = set()
    for node in nodes:
        match node:
            case ast.Constant(value=str(name)):
                named.add(name)
            case ast.Name(id="AUTO") | ast.Attribute(attr="AUTO"):
                named.add(AUTO)
            case ast.Tuple(elts=parts) | ast.List(elts=parts) | ast.Set(elts=parts):
                named |= names_in(*parts)
    return named & NAMES


def compared(tree: ast.AST) -> Iterator[tuple[ast.AST, set[str]]]:
    """Yield each expression that compares or looks up an environment type, with the names in it."""
    for node in ast.walk(tree):
        match node:
            case ast.Compare(left=left, comparators=others):
                yield node, names_in(left, *others)
            case ast.Subscript(slice=ast.Constant() as key) | ast.Call(func=ast.Attribute(attr="get"), args=[key, *_]):
                yield node, names_in(key)
            case ast.Dict(keys=keys):
                yield node, names_in(*filter(None, keys)) & ENVIRONMENT_TYPES.keys()
            case ast.MatchValue(value=value):
                yield node, names_in(value)
            case ast.Call(func=ast.Name(id="isinstance" | "issubclass"), args=[_, classes]):
                yield node, identifiers(classes) & CLASSES


def found_in(source: str) -> list[str]:
    """Return a module's expressions that compare environment types, with their lines."""
    found = []
    for node, names in compared(ast.parse(source)):
        words = identifiers(node)
        if any(not words & OTHER_THINGS.get(name, set()) for name in names):
            found.append(f"{getattr(node, 'lineno', 0)}: {ast.unparse(node)}")
    return found


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_module_compares_no_environment_type(path: Path) -> None:
    assert found_in(path.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    "expression",
    [
        'kind == "local"',
        '"docker" in plan.environment_types',
        'harness.environment_type not in ("local", AUTO)',
        "rules.environment_type == AUTO",
        'plan.environment_types.get("local")',
        'LITTLE_GIB["docker"]',
        'CLEANUP_SCRIPTS = {"modal": SCRIPT}',
        "isinstance(environment, LocalEnvironment)",
        "isinstance(environment, (DockerSandbox, sandbox.OpenEnvironment))",
        "issubclass(found, BaseEnvironment)",
        'match kind:\n    case "modal": pass',
    ],
)
def test_finds_comparison_of_environment_type(expression: str) -> None:
    assert len(found_in(expression)) == 1


@pytest.mark.parametrize(
    "expression",
    [
        'engine == "local"',
        'reasoning_parser in ("auto", None)',
        'program_output("docker", "info") is None',
        "entry_of(kind).needs_docker",
        '{"docker_image": image}',
        "isinstance(environment, Examinable)",
        "isinstance(candidate, LocalModel)",
    ],
)
def test_ignores_other_expressions(expression: str) -> None:
    assert found_in(expression) == []


@pytest.mark.parametrize(
    "module", [entry.inventory for entry in ENVIRONMENT_TYPES.values() if entry.remote and entry.inventory]
)
def test_inventory_script_imports_nothing_of_this_project(module: str) -> None:
    script = find_spec(module)
    assert script is not None and script.origin is not None
    tree = ast.parse(Path(script.origin).read_text(encoding="utf-8"))
    imported = [alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
    imported += [str(node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    assert imported and not [name for name in imported if name.startswith("harbortrainer")]
