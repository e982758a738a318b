"""The documentation site: the reference has every key and command, the navigation every page.

These tests do not run MkDocs. `make docs` fails on a broken link and on a page that loads anything from another host.
"""

import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path

import made_pages
import pytest
import typer
import yaml

from harbortrainer.cli import app
from harbortrainer.config.prime_rl_schema import is_known, key_support, key_types, known_keys

ROOT = Path(__file__).parents[1]
pytestmark = pytest.mark.process


@pytest.fixture(scope="module")
def rows() -> dict[str, list[str]]:
    """Return the cells of each row of the page of keys, by dotted key."""
    found = {}
    for table, body in re.findall(r"^## (.+)\n((?:(?!## ).*\n)+)", made_pages.keys_page(), re.MULTILINE):
        for row in re.findall(r"^\| `([^`]+)` \| (.*) \|$", body, re.MULTILINE):
            prefix = f"{table.strip('`')}." if table.startswith("`") else ""
            found[prefix + row[0]] = [cell.strip() for cell in re.split(r"(?<!\\)\|", row[1])]
    return found


def test_reference_lists_every_key_once(rows) -> None:
    assert set(rows) == set(key_types())
    assert set(known_keys()) <= set(rows)
    assert len(rows) == made_pages.keys_page().count("\n| `")


def test_every_key_has_values_and_description(rows) -> None:
    for key, (values, _, meaning) in rows.items():
        assert values, key
        assert meaning.endswith((".", "...")) or meaning[-1].isalnum(), (key, meaning)


def test_key_has_choices_default_and_description(rows) -> None:
    harness = rows["orchestrator.train.source.env.agent.harness.agent_timeout"]
    assert harness[:2] == ['`"verify"` or `"zero"` or `"mask"`', '`"verify"`']
    assert "ran out of time" in harness[2]
    assert rows["trainer.optim.lr"][1:] == ["`1e-06`", "Peak learning rate."]
    assert rows["orchestrator.train"][1] == "required"


def test_unsupported_key_is_marked(rows) -> None:
    assert rows["slurm"][2].startswith("Ignored")
    assert rows["trainer.max_steps"][2] == "Alias of `max_steps`."
    for key, (*_, meaning) in rows.items():
        if key_support(key) == "refused" and "default" not in meaning:
            assert "Refused" in meaning or key in ("trainer.loss.type", "trainer.optim.type"), key


def commands(command, name: str) -> Iterator[tuple]:
    """Yield a command and its subcommands with their full names."""
    yield name, command
    for word, below in getattr(command, "commands", {}).items():
        yield from commands(below, f"{name} {word}")


def test_reference_lists_every_command_and_option() -> None:
    page = made_pages.commands_page()
    sections = dict(re.findall(r"^#+ `(.+)`\n((?:(?!#).*\n)+)", page, re.MULTILINE))
    below = dict(commands(typer.main.get_command(app), "harbortrainer"))
    del below["harbortrainer"]
    assert set(sections) == set(below)
    for words, command in below.items():
        for option in [name for each in command.params for name in (*each.opts, *each.secondary_opts)]:
            assert option in sections[words] or option.upper() in sections[words], f"{words} {option}"


def documented_commands() -> list[str]:
    """Return every line in a code block of a page that calls our command, without the shell prompt."""
    lines = [
        line.strip().removeprefix("$ ")
        for page in (*(ROOT / "docs").glob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md")
        for line in re.sub(r"\\\n\s*", "", page.read_text(encoding="utf-8")).splitlines()
        if line.startswith(("harbortrainer ", "$ harbortrainer ", "    harbortrainer ", ".venv/bin/harbortrainer "))
    ]
    return sorted({line.removeprefix(".venv/bin/") for line in lines if "(one process)" not in line})


@pytest.mark.parametrize("line", documented_commands())
def test_documented_command_line_is_valid(line: str) -> None:
    words = shlex.split(line, comments=True)
    below = dict(commands(typer.main.get_command(app), "harbortrainer"))
    called = max((name for name in below if f"{line} ".startswith(f"{name} ")), key=len)
    command, words = below[called], words[len(called.split()) :]
    with command.make_context(called, words) as context:
        keys = [word.removeprefix("--").replace("-", "_") for word in context.args if word.startswith("--")]
        assert [key for key in keys if not is_known(key)] == []


def pages(entry: object) -> Iterator[str]:
    """Yield the pages of a part of the navigation."""
    if isinstance(entry, str):
        yield entry
    for part in entry.values() if isinstance(entry, dict) else entry if isinstance(entry, list) else ():
        yield from pages(part)


def test_navigation_lists_every_page_once() -> None:
    docs = ROOT / "docs"
    written = {path.relative_to(docs).as_posix() for path in docs.rglob("*.md")}
    generated = {*made_pages.ROOT_PAGES, "reference/keys.md", "reference/commands.md"}
    named = list(pages(yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"]))
    assert sorted(named) == sorted(written | generated)


def test_readme_links_to_existing_pages() -> None:
    home = made_pages.relink((ROOT / "README.md").read_text(encoding="utf-8"))
    links = [link for link in re.findall(r"\]\(([^)#]+)", home) if not link.startswith("http")]
    missing = [link for link in links if not (ROOT / "docs" / link).is_file() and link not in made_pages.ROOT_PAGES]
    assert (missing, len(links) > 10) == ([], True)


@pytest.mark.parametrize(
    ("page", "loaded"),
    [
        ('<script src="https://unpkg.com/shim"></script>', ["https://unpkg.com/shim"]),
        ('<link rel=stylesheet href="//cdn.example/a.css">', ["//cdn.example/a.css"]),
        ('<img alt="a" src=http://elsewhere/a.png>', ["http://elsewhere/a.png"]),
        ('<a href="https://harborframework.com">Harbor</a><script src="assets/a.js"></script>', []),
    ],
)
def test_external_resources_are_found(page: str, loaded: list[str]) -> None:
    assert made_pages.loaded_from_elsewhere(page) == loaded


def test_docs_dependencies_are_optional() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert "docs" not in project["tool"]["uv"]["default-groups"]
    required = [*project["project"]["dependencies"], *project["dependency-groups"]["dev"]]
    assert [name for name in required if "mkdocs" in name] == []
