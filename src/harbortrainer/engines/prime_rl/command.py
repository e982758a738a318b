"""The command that starts Prime-RL, and the environment it runs in.

Contract: what we run and what we print for the user is the same command; it works from the repository's root.
`--no-sync`, since uv would otherwise take back what was installed beside Prime-RL (harbor).
"""

import os
import shlex
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from dotenv import dotenv_values

from harbortrainer.engines.prime_rl.place import SOURCE, Place
from harbortrainer.runs.label import RUN_VARIABLE

TRIALS_VARIABLE = "HARBORTRAINER_TRIALS_DIR"


def build(place: Place, file: Path, overrides: Sequence[str]) -> list[str]:
    """The words of the command: through uv where there is one, else the installed `rl` itself."""
    uv = find_uv()
    start = [uv, "run", "--project", str(place.root), "--no-sync", "rl"] if uv else [str(place.rl)]
    return [*start, "@", str(file), *overrides]


def printed(place: Place, file: Path, overrides: Sequence[str]) -> str:
    """The command as a user types it, with paths relative to the current folder where they can be."""
    words = ["uv", "run", "--project", _short(place.root), "--no-sync", "rl", "@", _short(file), *overrides]
    return f"PYTHONPATH={shlex.quote(_short(SOURCE))} {shlex.join(words)}"


def environment(place: Place, *, run: str, trials: Path, base: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The variables of the process: ours, then `.env`, then the run's.

    `.env` never overrides what is set already.
    """
    path = [str(place.rl.parent), base.get("PATH", "")]
    source = [str(SOURCE), base.get("PYTHONPATH", "")]
    own = {
        RUN_VARIABLE: run,
        TRIALS_VARIABLE: str(trials),
        "PYTHONPATH": os.pathsep.join(part for part in source if part),
        "PATH": os.pathsep.join(part for part in path if part),
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "PYTHONUNBUFFERED": "1",
    }
    return dotenv() | dict(base) | own


def dotenv() -> dict[str, str]:
    """What `.env` in the current folder says."""
    return {key: value for key, value in dotenv_values(".env").items() if value is not None}


def find_uv() -> str | None:
    """The uv that the Makefile installed, else the one on the path; one that does not run does not count."""
    candidates = [str(SOURCE.parent / ".tools" / "uv"), shutil.which("uv")]
    return next((uv for uv in candidates if uv is not None and _runs(uv)), None)


def _runs(program: str) -> bool:
    try:
        return subprocess.run([program, "--version"], capture_output=True, timeout=20, check=False).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


def _short(path: Path) -> str:
    path = path.resolve()
    here = Path.cwd()
    return str(path.relative_to(here)) if path.is_relative_to(here) else str(path)
