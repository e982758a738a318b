"""MkDocs hooks for generated pages: README, CONTRIBUTING and CHANGELOG, and the reference of commands and keys.

MkDocs calls `on_files` (mkdocs.yml). The pages are generated from the code and never written to disk.
Invariant: the reference has every command and key of the code; `tests/test_site.py` compares them.
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

from harbortrainer.config.plugin import HarnessKeys, TasksetKeys
from harbortrainer.config.prime_rl_schema import (
    OWN_KEYS,
    REFUSED,
    SHARED,
    SOURCES,
    key_support,
    key_types,
    longest,
    tables,
)
from harbortrainer.config.runfile import RunConfig

if typing.TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
LOG = logging.getLogger("mkdocs.hooks.made_pages")
FORMULA = r'<(?:span|div) class="arithmatex">\\([(\[])(.*?)\\[)\]]</(?:span|div)>'
ROOT_PAGES = {"index.md": "README.md", "contributing.md": "CONTRIBUTING.md", "changelog.md": "CHANGELOG.md"}

KEYS = """# Run file keys

All keys of Prime-RL's schema (commit 559b44772), of this project and of its plugin, by table, with their support by the
embedded engine. [The run file](../config.md) explains the most important ones.

- Empty default: a table, or a Prime-RL key that this project does not use.
- `null` is written `"None"`, because TOML has no null.
- `env` and `serve` have further keys of verifiers, such as `env.agent.max_turns`. Verifiers' own classes check them.
"""


def on_files(files: "Files", config: "MkDocsConfig") -> "Files":
    """Add the generated pages to the site."""
    from mkdocs.structure.files import File  # MkDocs is not installed for the tests

    pages = {name: relink((ROOT / source).read_text(encoding="utf-8")) for name, source in ROOT_PAGES.items()}
    pages |= {"reference/commands.md": commands_page(), "reference/keys.md": keys_page()}
    for name, content in pages.items():
        files.append(File.generated(config, name, content=content))
    return files


def on_page_content(html: str, page: "Page", config: "MkDocsConfig", files: "Files") -> str:
    """Convert formulas to MathML, which browsers render without a script."""
    from latex2mathml.converter import convert

    def render(found: re.Match[str]) -> str:
        if found[1] == "(":
            return convert(unescape(found[2]))
        return f'<div class="formula">{convert(unescape(found[2]), display="block")}</div>'

    return re.sub(FORMULA, render, html, flags=re.DOTALL)


def on_post_page(output: str, page: "Page", config: "MkDocsConfig") -> None:
    """Warn if a page loads something from another host or has an unconverted formula; `--strict` makes it an error."""
    if "arithmatex" in output:
        LOG.warning("%s has a formula that was not converted", page.file.src_uri)
    for address in loaded_from_elsewhere(output):
        LOG.warning("%s loads %s from another host", page.file.src_uri, address)


def loaded_from_elsewhere(page: str) -> list[str]:
    """Return the external URLs that a browser loads with a page; links do not count."""
    return re.findall(
        r"<(?:script|link|img|iframe|source|object)\b[^>]*?\s(?:src|href|data)=\"?((?:https?:)?//[^\"\s>]+)", page
    )


def relink(text: str) -> str:
    """Rewrite the links of a page of the repository's root for docs/."""
    text = text.replace("](docs/", "](")
    return re.sub(r"\]\((README|CONTRIBUTING|CHANGELOG)\.md", lambda found: f"]({_page(found[0][2:])}", text)


def _page(source: str) -> str:
    return next(name for name, root in ROOT_PAGES.items() if root == source)


def commands_page() -> str:
    """Return all commands with their options, as typer prints them, without typer's lists of subcommands."""
    words = [sys.executable, "-m", "typer", "harbortrainer.cli", "utils", "docs", "--name", "harbortrainer"]
    output = subprocess.run([*words, "--title", "Command reference"], capture_output=True, text=True, check=True).stdout
    output = re.sub(r"\*\*Commands\*\*:\n\n(?:\* .*\n)+\n?", "", output)
    return re.sub(r"Examples:\n\n\x08\n((?:harbortrainer .*\n)+)", r"**Examples**:\n\n```bash\n\1```\n", output)


def keys_page() -> str:
    """Return the page of all keys, with one section per table."""
    fields = dict(documented_keys())
    sections = groupby(
        sorted(key_types(), key=lambda key: key.rpartition(".")[::2]), lambda key: key.rpartition(".")[0]
    )
    return KEYS + "".join(section(table, keys, fields) for table, keys in sections)


def section(table: str, keys: Iterable[str], fields: dict[str, list[FieldInfo]]) -> str:
    """Return the section of a table: its keys with values, default and description."""
    lines = [
        f"\n## {f'`{table}`' if table else 'Top level'}\n",
        "| key | values | default | description |",
        "|---|---|---|---|",
    ]
    for key in keys:
        known = fields.get(key, [])
        cells = [f"`{key.rpartition('.')[2]}`", values(key, known), default(known), description(key, known)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def documented_keys() -> Iterator[tuple[str, list[FieldInfo]]]:
    """Yield every key with a field of our classes; a union of tables gives several fields."""
    found: dict[str, list[FieldInfo]] = {}
    walk(RunConfig, "", found)
    for source in SOURCES:
        walk(TasksetKeys, f"{source}.env.taskset.", found)
        walk(HarnessKeys, f"{source}.env.agent.harness.", found)
    yield from found.items()


def walk(table: type[BaseModel], prefix: str, found: dict[str, list[FieldInfo]]) -> None:
    """Collect the fields of a table and its nested tables."""
    for name, field in table.model_fields.items():
        found.setdefault(f"{prefix}{name}", []).append(field)
        for inner in tables(field.annotation):
            walk(inner, f"{prefix}{name}.", found)


def values(key: str, fields: list[FieldInfo]) -> str:
    """Return the allowed values: the choices, or the value types."""
    options = [value for field in fields for value in choices(field.annotation)]
    return " or ".join(
        dict.fromkeys(map(code, options))
        if options
        else ["null" if name == "none" else name for name in sorted(key_types()[key])]
    )


def choices(annotation: object) -> tuple[object, ...]:
    """Return the values of a Literal, also within a union."""
    if isinstance(annotation, typing.TypeAliasType):
        return choices(annotation.__value__)
    inner = typing.get_args(annotation)
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return tuple(value for part in inner for value in choices(part))
    return inner if typing.get_origin(annotation) is typing.Literal else ()


def code(value: object) -> str:
    """Format a value as in the run file."""
    return f"`{json.dumps(value, default=str)}`"


def default(fields: list[FieldInfo]) -> str:
    """Return the default of a key; empty for a table."""
    if not fields:
        return ""
    if fields[0].is_required():
        return "required"
    value = fields[0].get_default(call_default_factory=True)
    if isinstance(value, BaseModel):
        return ""
    return "null" if value is None else code(value)


def description(key: str, fields: list[FieldInfo]) -> str:
    """Return the description of the field, or the embedded engine's support of the key."""
    if fields:
        sentences = dict.fromkeys(" ".join((field.description or "").split()) for field in fields)
        return " ".join(sentences).replace("|", "\\|")
    match "supported" if longest(key, OWN_KEYS) else key_support(key.removesuffix(".*")):
        case "shared":
            return f"Alias of `{SHARED[key]}`."
        case "unused":
            return "Ignored: only Prime-RL's own processes use it."
        case "refused":
            advice = REFUSED[longest(key, REFUSED)].do
            return f"Refused by the embedded engine. {advice[0].upper()}{advice[1:]}."
    return "Any name." if key.endswith(".*") else "Table of verifiers; the plugin's keys in it are listed below."
