"""The pages of the site that nobody writes: README, CONTRIBUTING and CHANGELOG with their links turned, and the
reference of every command and every key, made from the code. MkDocs calls `on_files` (mkdocs.yml); the pages are files
nowhere.

Invariant: a command or a key is in the reference because it is in the code; `tests/test_site.py` compares them.
"""

import json
import logging
import re
import subprocess
import sys
import types
import typing
from collections.abc import Iterable, Iterator
from html import unescape
from itertools import groupby
from pathlib import Path

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from harbortrainer.config.fates import OURS, REFUSED, SHARED, fate, longest
from harbortrainer.config.kinds import tables
from harbortrainer.config.known_keys import SOURCES, key_kinds
from harbortrainer.config.plugin import HarnessKeys, TasksetKeys
from harbortrainer.config.runfile import RunConfig

if typing.TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
LOG = logging.getLogger("mkdocs.hooks.made_pages")
FORMULA = r'<(?:span|div) class="arithmatex">\\([(\[])(.*?)\\[)\]]</(?:span|div)>'
TURNED = {"index.md": "README.md", "contributing.md": "CONTRIBUTING.md", "changelog.md": "CHANGELOG.md"}

KEYS = """# Every key

The keys of Prime-RL's schema (its commit 559b44772), of this project and of its plugin, table by table, and what the
embedded engine does with each. [The run file](../config.md) has the few that matter at first. Where nothing stands
under *default*, the key is a table, or Prime-RL's own and not read here. In `env` and `serve` verifiers has more keys,
`env.agent.max_turns` among them; its own classes check them.
"""


def on_files(files: "Files", config: "MkDocsConfig") -> "Files":
    """Add the made pages to the site."""
    from mkdocs.structure.files import File  # the tests have no MkDocs

    pages = {name: turned((ROOT / source).read_text(encoding="utf-8")) for name, source in TURNED.items()}
    pages |= {"reference/commands.md": commands_page(), "reference/keys.md": keys_page()}
    for name, content in pages.items():
        files.append(File.generated(config, name, content=content))
    return files


def on_page_content(html: str, page: "Page", config: "MkDocsConfig", files: "Files") -> str:
    """Formulas as MathML, which browsers draw by themselves."""
    from latex2mathml.converter import convert

    def drawn(found: re.Match[str]) -> str:
        if found[1] == "(":
            return convert(unescape(found[2]))
        return f'<div class="formula">{convert(unescape(found[2]), display="block")}</div>'

    return re.sub(FORMULA, drawn, html, flags=re.DOTALL)


def on_post_page(output: str, page: "Page", config: "MkDocsConfig") -> None:
    """Warn, which `--strict` makes an error, of a page that would load something from another machine, or of a formula
    that is left as it was written."""
    if "arithmatex" in output:
        LOG.warning("%s has a formula that was not drawn", page.file.src_uri)
    for address in loaded_from_elsewhere(output):
        LOG.warning("%s loads %s from another machine", page.file.src_uri, address)


def loaded_from_elsewhere(page: str) -> list[str]:
    """The addresses of other machines that a browser asks when it opens a page; links that are clicked are none."""
    return re.findall(
        r"<(?:script|link|img|iframe|source|object)\b[^>]*?\s(?:src|href|data)=\"?((?:https?:)?//[^\"\s>]+)", page
    )


def turned(text: str) -> str:
    """A page of the repository's root as one of docs/."""
    text = text.replace("](docs/", "](")
    return re.sub(r"\]\((README|CONTRIBUTING|CHANGELOG)\.md", lambda found: f"]({_page(found[0][2:])}", text)


def _page(source: str) -> str:
    return next(name for name, root in TURNED.items() if root == source)


def commands_page() -> str:
    """Every command with its options, as typer writes it; its lists of commands, cut short, are left out."""
    words = [sys.executable, "-m", "typer", "harbortrainer.cli", "utils", "docs", "--name", "harbortrainer"]
    said = subprocess.run([*words, "--title", "Every command"], capture_output=True, text=True, check=True).stdout
    return re.sub(r"\*\*Commands\*\*:\n\n(?:\* .*\n)+\n?", "", said)


def keys_page() -> str:
    """Every key, in a section for each table."""
    fields = dict(described())
    sections = groupby(
        sorted(key_kinds(), key=lambda key: key.rpartition(".")[::2]), lambda key: key.rpartition(".")[0]
    )
    return KEYS + "".join(section(table, keys, fields) for table, keys in sections)


def section(table: str, keys: Iterable[str], fields: dict[str, list[FieldInfo]]) -> str:
    """A table of the run file: its keys, what each takes, its default, and what it does."""
    lines = [f"\n## {f'`{table}`' if table else 'At the top'}\n", "| key | takes | default | |", "|---|---|---|---|"]
    for key in keys:
        known = fields.get(key, [])
        cells = [f"`{key.rpartition('.')[2]}`", takes(key, known), default(known), meaning(key, known)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def described() -> Iterator[tuple[str, list[FieldInfo]]]:
    """Every key that a class of ours describes, with its fields: several where a table has kinds."""
    found: dict[str, list[FieldInfo]] = {}
    walk(RunConfig, "", found)
    for source in SOURCES:
        walk(TasksetKeys, f"{source}.env.taskset.", found)
        walk(HarnessKeys, f"{source}.env.agent.harness.", found)
    yield from found.items()


def walk(table: type[BaseModel], prefix: str, found: dict[str, list[FieldInfo]]) -> None:
    """Collect the fields of a table and of the tables in it."""
    for name, field in table.model_fields.items():
        found.setdefault(f"{prefix}{name}", []).append(field)
        for inner in tables(field.annotation):
            walk(inner, f"{prefix}{name}.", found)


def takes(key: str, fields: list[FieldInfo]) -> str:
    """What may be written: the words to choose from, or the kinds of value."""
    words = [value for field in fields for value in choices(field.annotation)]
    return " or ".join(dict.fromkeys(map(code, words)) if words else sorted(key_kinds()[key]))


def choices(annotation: object) -> tuple[object, ...]:
    """The values of a Literal, also in a union."""
    if isinstance(annotation, typing.TypeAliasType):
        return choices(annotation.__value__)
    inner = typing.get_args(annotation)
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return tuple(value for part in inner for value in choices(part))
    return inner if typing.get_origin(annotation) is typing.Literal else ()


def code(value: object) -> str:
    """A value as the run file spells it."""
    return f"`{json.dumps(value, default=str)}`"


def default(fields: list[FieldInfo]) -> str:
    """What a key is when it is left out; nothing for a table."""
    if not fields:
        return ""
    if fields[0].is_required():
        return "required"
    value = fields[0].get_default(call_default_factory=True)
    if isinstance(value, BaseModel):
        return ""
    return "none" if value is None else code(value)


def meaning(key: str, fields: list[FieldInfo]) -> str:
    """The sentence under the field, or what the embedded engine does with the key instead."""
    if fields:
        sentences = dict.fromkeys(" ".join((field.description or "").split()) for field in fields)
        return " ".join(sentences).replace("|", "\\|")
    match "honoured" if longest(key, OURS) else fate(key.removesuffix(".*")):
        case "shared":
            return f"Read as `{SHARED[key]}`."
        case "unused":
            return "Left alone: only Prime-RL's own processes use it."
        case "refused":
            return f"The embedded engine refuses it: {REFUSED[longest(key, REFUSED)].do}."
    return "Any name." if key.endswith(".*") else "verifiers' own table; the plugin's keys in it are below."
