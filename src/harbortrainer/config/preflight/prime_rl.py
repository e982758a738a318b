"""Prime-RL: the submodule at its pin, its environment, and the plugin in it."""

import subprocess
from collections.abc import Iterator

from harbortrainer.config.preflight.facts import Facts
from harbortrainer.config.preflight.finding import Finding, green, red, yellow
from harbortrainer.engines.prime_rl.place import PIN, Place
from harbortrainer.errors import UserError

PACKAGES = ("harbor==0.21.0", "python-dotenv", "tomlkit", "psutil")
NEEDED = ("harbor", "litellm", "dotenv", "tomlkit", "psutil")
"""What the plugin imports and Prime-RL's own environment may lack."""


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
    yield plugin(facts.place)


def pinned(place: Place) -> Finding:
    """Is it the commit that the configs are written for?"""
    commit = _output("git", "-C", str(place.root), "rev-parse", "HEAD").strip()
    if commit == PIN:
        return green("Prime-RL", f"at {PIN[:9]}")
    do = "run `git submodule update`, or see docs/prime-rl.md on moving the pin"
    return yellow("Prime-RL", f"at {commit[:9] or 'an unknown commit'}, not {PIN[:9]}", do)


def plugin(place: Place) -> Finding:
    """Whether its Python finds what the plugin imports."""
    code = f"import importlib.util as u; print(*[m for m in {NEEDED!r} if u.find_spec(m) is None])"
    python = place.environment / "bin" / "python"
    missing = _output(str(python), "-c", code).strip() if python.exists() else "python"
    if missing:
        do = f"run `uv pip install --python {python} {' '.join(PACKAGES)}`"
        return red("plugin", f"not in Prime-RL's environment: {missing}", do)
    return green("plugin", "harbor is in Prime-RL's environment")


def _output(*words: str) -> str:
    try:
        return subprocess.run(words, capture_output=True, text=True, timeout=60, check=False).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ""
