"""The command that starts Prime-RL, and the environment it runs in.

Contract: what we run and what we print for the user is the same command; it works from the repository's root.
`--no-sync`, since uv would otherwise take back what was installed beside Prime-RL (harbor).
"""

import os
import shlex
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from dotenv import dotenv_values

from harbortrainer.engines.prime_rl.checkout import SOURCE, Checkout
from harbortrainer.engines.programs import output_of
from harbortrainer.harbor_side import LITELLM_OFFLINE
from harbortrainer.runs.label import RUN_VARIABLE, TRIALS_DIR_VARIABLE


def build(checkout: Checkout, file: Path, overrides: Sequence[str]) -> list[str]:
    """The words of the command: through uv where there is one, else the installed `rl` itself."""
    uv = find_uv()
    start = [uv, "run", "--project", str(checkout.root), "--no-sync", "rl"] if uv else [str(checkout.rl)]
    return [*start, "@", str(file), *overrides]


def printed(checkout: Checkout, file: Path, overrides: Sequence[str]) -> str:
    """The command as a user types it, with paths relative to the current folder where they can be."""
    words = ["uv", "run", "--project", _short(checkout.root), "--no-sync", "rl", "@", _short(file), *overrides]
    return f"PYTHONPATH={shlex.quote(_short(SOURCE))} {shlex.join(words)}"


def environment(checkout: Checkout, *, run: str, trials: Path, base: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The variables of the process: ours, then `.env`, then the run's.

    `.env` never overrides what is set already.
    """
    path = [str(checkout.rl.parent), base.get("PATH", "")]
    source = [str(SOURCE), base.get("PYTHONPATH", "")]
    own = {
        RUN_VARIABLE: run,
        TRIALS_DIR_VARIABLE: str(trials),
        "PYTHONPATH": os.pathsep.join(part for part in source if part),
        "PATH": os.pathsep.join(part for part in path if part),
        **LITELLM_OFFLINE,
        "PYTHONUNBUFFERED": "1",
        # Prime-RL's processes rename themselves, which without this overwrites the environment they are known by.
        "SPT_NOENV": "1",
    }
    return dotenv() | dict(base) | own


def dotenv() -> dict[str, str]:
    """What `.env` in the current folder says."""
    return {key: value for key, value in dotenv_values(".env").items() if value is not None}


def find_uv() -> str | None:
    """The uv that the Makefile installed, else the one on the path; one that does not run does not count."""
    candidates = [str(SOURCE.parent / ".tools" / "uv"), shutil.which("uv")]
    return next((uv for uv in candidates if uv is not None and output_of(uv, "--version") is not None), None)


def _short(path: Path) -> str:
    path = path.resolve()
    here = Path.cwd()
    return str(path.relative_to(here)) if path.is_relative_to(here) else str(path)
