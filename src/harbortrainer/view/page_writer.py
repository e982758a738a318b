"""Templates filled in: one page of the server, or all of an export.

Invariant: every value is escaped on its way in, and shows each of its characters; what is not text is SVG and token
marks that were made here.
"""

import base64
import hashlib
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.resources import files

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from harbortrainer.view import spoken
from harbortrainer.view.hostile_text import visible
from harbortrainer.view.outcome_styles import outcome_style
from harbortrainer.view.page_links import FileLinks, ServerLinks
from harbortrainer.view.shown_trial import RunHead
from harbortrainer.view.svg_drawing import short

POLICY = "default-src 'none'; img-src 'self' data:; connect-src 'self'; form-action 'self'; base-uri 'none'"
"""Nothing is loaded from elsewhere; styles and scripts are named beside it."""


@cache
def _templates() -> Environment:
    # Lines of a template that only decide something leave no blank lines in the page.
    found = Environment(
        loader=PackageLoader("harbortrainer.view"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_seen,
    )
    found.filters |= {
        "reward": spoken.reward,
        "duration": spoken.duration,
        "count": spoken.count,
        "several": spoken.several,
        "short": short,
        "near": spoken.near,
        "outcome_style": outcome_style,
    }
    return found


def _seen(value: object) -> object:
    """What stands in a page instead of a value: text with every character visible."""
    return visible(value) if isinstance(value, str) and not isinstance(value, Markup) else value


@cache
def asset(name: str) -> str:
    """The text of a file of `static/`."""
    return (files("harbortrainer.view") / "static" / name).read_text(encoding="utf-8")


def body(template: str, links: ServerLinks, **values: object) -> Markup:
    """The inside of a page."""
    return Markup(_templates().get_template(template).render(links=links, **values))


def page(title: str, inside: Markup, head: RunHead, links: ServerLinks, *, here: str = "", stamp: str = "") -> str:
    """A whole page of the server."""
    values = {"title": title, "inside": inside, "head": head, "here": here, "stamp": stamp, "links": links}
    return _templates().get_template("page.html").render(values)


def one_file(title: str, sections: Sequence[tuple[str, Markup]], head: RunHead, links: FileLinks) -> str:
    """A page that needs nothing but itself; `sections` by the anchor that they have."""
    style, script = asset("style.css"), asset("page.js")
    policy = f"{POLICY}; style-src '{_hash(style)}'; script-src '{_hash(script)}'"
    values: Mapping[str, object] = {
        "title": title,
        "sections": sections,
        "head": head,
        "links": links,
        "style": Markup(style),
        "script": Markup(script),
        "policy": policy,
    }
    return _templates().get_template("file.html").render(values)


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
