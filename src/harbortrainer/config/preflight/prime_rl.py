"""Prime-RL: the submodule at its pin, its environment, and the plugin in it."""

import subprocess
from collections.abc import Iterator

from harbortrainer.config.preflight.facts import Facts
from harbortrainer.config.preflight.finding import Finding, green, red, yellow
from harbortrainer.engines.prime_rl.place import PIN, Place
from harbortrainer.errors import UserError

NEEDED = ("harbor", "litellm", "psutil", "dockerfile_parse")
"""What the plugin imports. Prime-RL's lock brings harbor along; a provider's own package comes with harbor's extra."""

HARBOR = "harbor[{extras}]==0.21.0"


def check(facts: Facts) -> Iterator[Finding]:
    """Source, environment, plugin."""
    if not facts.prime_rl:
        return
    try:
        facts.place.need()
    except UserError as error:
        yield red("Prime-RL", f"{error.what} ({error.where})", error.do)
        return
    yield pinned(facts.place)
    yield plugin(facts.place, [kind for kind in facts.environment_types if kind.isidentifier()])


def pinned(place: Place) -> Finding:
    """Is it the commit that the configs are written for?"""
    commit = _output("git", "-C", str(place.root), "rev-parse", "HEAD").strip()
    if commit == PIN:
        return green("Prime-RL", f"at {PIN[:9]}")
    do = "run `git submodule update`, or see docs/prime-rl.md on moving the pin"
    return yellow("Prime-RL", f"at {commit[:9] or 'an unknown commit'}, not {PIN[:9]}", do)


def plugin(place: Place, environment_types: list[str]) -> Finding:
    """Whether its Python finds what the plugin imports."""
    extras = [kind for kind in environment_types if kind not in ("local", "docker")]
    needed = (*NEEDED, *extras)
    code = f"import importlib.util as u; print(*[m for m in {needed!r} if u.find_spec(m) is None])"
    python = place.environment / "bin" / "python"
    missing = _output(str(python), "-c", code).strip() if python.exists() else "python"
    if missing:
        package = HARBOR.format(extras=",".join(["modal", *extras]) if "modal" not in extras else ",".join(extras))
        do = f"run `uv pip install --python {python} '{package}' psutil`"
        return red("plugin", f"not in Prime-RL's environment: {missing}", do)
    return green("plugin", "what it imports is in Prime-RL's environment")


def _output(*words: str) -> str:
    try:
        return subprocess.run(words, capture_output=True, text=True, timeout=60, check=False).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ""
