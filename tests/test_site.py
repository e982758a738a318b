"""The site that `make docs` builds: its reference has every key and every command, its navigation every page.

MkDocs is not here; `make docs` itself fails on a broken link, and on a page that loads anything from another machine.
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
from harbortrainer.config.fates import fate
from harbortrainer.config.known_keys import is_known, key_kinds, known_keys

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def rows() -> dict[str, list[str]]:
    """The cells after the key of each row of the page of keys, by the whole key."""
    found = {}
    for table, body in re.findall(r"^## (.+)\n((?:(?!## ).*\n)+)", made_pages.keys_page(), re.MULTILINE):
        for row in re.findall(r"^\| `([^`]+)` \| (.*) \|$", body, re.MULTILINE):
            prefix = f"{table.strip('`')}." if table.startswith("`") else ""
            found[prefix + row[0]] = [cell.strip() for cell in re.split(r"(?<!\\)\|", row[1])]
    return found


def test_every_key_is_in_the_reference_once(rows) -> None:
    assert set(rows) == set(key_kinds())
    assert set(known_keys()) <= set(rows)
    assert len(rows) == made_pages.keys_page().count("\n| `")


def test_every_key_says_what_it_takes_and_does(rows) -> None:
    for key, (takes, _, meaning) in rows.items():
        assert takes, key
        assert meaning.endswith((".", "...")) or meaning[-1].isalnum(), (key, meaning)


def test_a_key_is_told_with_its_choices_its_default_and_its_sentence(rows) -> None:
    harness = rows["orchestrator.train.source.env.agent.harness.agent_timeout"]
    assert harness[:2] == ['`"verify"` or `"zero"` or `"mask"`', '`"verify"`']
    assert "ran out of time" in harness[2]
    assert rows["trainer.optim.lr"][1:] == ["`1e-06`", "Peak learning rate."]
    assert rows["orchestrator.train"][1] == "required"


def test_a_key_that_the_embedded_engine_does_not_honour_says_so(rows) -> None:
    assert rows["slurm"][2].startswith("Left alone")
    assert rows["trainer.max_steps"][2] == "Read as `max_steps`."
    for key, (*_, meaning) in rows.items():
        if fate(key) == "refused" and "default" not in meaning:
            assert "refuses" in meaning or key in ("trainer.loss.type", "trainer.optim.type"), key


def commands(command, name: str) -> Iterator[tuple]:
    """A command and those below it, by the words that call them."""
    yield name, command
    for word, below in getattr(command, "commands", {}).items():
        yield from commands(below, f"{name} {word}")


def test_every_command_with_every_option_is_in_the_reference() -> None:
    page = made_pages.commands_page()
    told = dict(re.findall(r"^#+ `(.+)`\n((?:(?!#).*\n)+)", page, re.MULTILINE))
    below = dict(commands(typer.main.get_command(app), "harbortrainer"))
    del below["harbortrainer"]
    assert set(told) == set(below)
    for words, command in below.items():
        for option in [name for each in command.params for name in (*each.opts, *each.secondary_opts)]:
            assert option in told[words] or option.upper() in told[words], f"{words} {option}"


def typed() -> list[str]:
    """Every line of a block of code on a page that calls our command, without what a shell adds to it."""
    lines = [
        line.strip().removeprefix("$ ")
        for page in (*(ROOT / "docs").glob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md")
        for line in re.sub(r"\\\n\s*", "", page.read_text(encoding="utf-8")).splitlines()
        if line.startswith(("harbortrainer ", "$ harbortrainer ", "    harbortrainer ", ".venv/bin/harbortrainer "))
    ]
    return sorted({line.removeprefix(".venv/bin/") for line in lines if "(one process)" not in line})


@pytest.mark.parametrize("line", typed())
def test_what_a_page_says_to_type_is_a_command_with_such_options(line: str) -> None:
    words = shlex.split(line, comments=True)
    below = dict(commands(typer.main.get_command(app), "harbortrainer"))
    called = max((name for name in below if f"{line} ".startswith(f"{name} ")), key=len)
    command, words = below[called], words[len(called.split()) :]
    with command.make_context(called, words) as context:
        keys = [word.removeprefix("--").replace("-", "_") for word in context.args if word.startswith("--")]
        assert [key for key in keys if not is_known(key)] == []


def pages(entry: object) -> Iterator[str]:
    """The pages of a part of the navigation."""
    if isinstance(entry, str):
        yield entry
    for part in entry.values() if isinstance(entry, dict) else entry if isinstance(entry, list) else ():
        yield from pages(part)


def test_every_page_is_in_the_navigation_once() -> None:
    docs = ROOT / "docs"
    written = {path.relative_to(docs).as_posix() for path in docs.rglob("*.md")}
    made = {*made_pages.TURNED, "reference/keys.md", "reference/commands.md"}
    named = list(pages(yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"]))
    assert sorted(named) == sorted(written | made)


def test_readme_leads_to_pages_of_the_site() -> None:
    home = made_pages.turned((ROOT / "README.md").read_text(encoding="utf-8"))
    links = [link for link in re.findall(r"\]\(([^)#]+)", home) if not link.startswith("http")]
    missing = [link for link in links if not (ROOT / "docs" / link).is_file() and link not in made_pages.TURNED]
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
def test_what_a_page_would_load_from_another_machine_is_found(page: str, loaded: list[str]) -> None:
    assert made_pages.loaded_from_elsewhere(page) == loaded


def test_the_site_is_no_part_of_any_other_installation() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert "docs" not in project["tool"]["uv"]["default-groups"]
    asked = [*project["project"]["dependencies"], *project["dependency-groups"]["dev"]]
    assert [name for name in asked if "mkdocs" in name] == []
