"""The checkout of Prime-RL (the submodule, or `HARBORTRAINER_PRIME_RL`), its start command and its environment.

Contract: the printed command is the one that is run, and it works from the repository's root. It has `--no-sync`,
because uv would otherwise remove packages that were installed beside Prime-RL (harbor).
"""

import os
import shlex
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dotenv import dotenv_values

from harbortrainer.config.prime_rl_key_names import Release
from harbortrainer.engines.programs import program_output
from harbortrainer.environment.request_check import RUN_KEY_FILE_VARIABLE
from harbortrainer.errors import UserError
from harbortrainer.harbor_compat import LITELLM_OFFLINE
from harbortrainer.runs.label import OWNER_VARIABLE, RUN_VARIABLE, TRIALS_DIR_VARIABLE
from harbortrainer.trials.http_proxies import bypass_proxies

PIN = "559b44772e471d1538537b8805cc77f3824a5e64"
"""Commit that the plugin and the configs are written for."""

SCHEMA = Path("packages/prime-rl-configs/src/prime_rl/configs/orchestrator.py")
"""The schema of `[orchestrator]` in a checkout."""

NEWER_CLASS = "class SourceGroupConfig"
"""Class of that schema from which sources inherit `algo` and `group_size`: the mark of the newer key names."""

VARIABLE = "HARBORTRAINER_PRIME_RL"
SOURCE = Path(__file__).resolve().parents[3]
"""Folder of the plugin, `harbor_env.py`; added to PYTHONPATH."""


@dataclass(frozen=True)
class Checkout:
    """A checkout of Prime-RL.

    Args:
        root: Its folder, which may be empty or missing.
    """

    root: Path

    @property
    def populated(self) -> bool:
        """Whether the folder has Prime-RL's source."""
        return (self.root / "pyproject.toml").is_file()

    @property
    def release(self) -> Release:
        """Whose keys its run files have; the pinned commit's if its source is missing.

        Raises:
            UserError: The commit has some of the renamed keys only.
        """
        try:
            schema = (self.root / SCHEMA).read_text(encoding="utf-8")
        except OSError:
            return "pin"
        if NEWER_CLASS in schema:
            return "v0.9"
        if "constant_trainer_batch_size" in schema:
            do = f"check out {PIN[:9]}, or a commit of October 2026 or later"
            raise UserError("this Prime-RL lies between the two supported generations", where=str(self.root), do=do)
        return "pin"

    @property
    def environment(self) -> Path:
        """Its virtual environment: UV_PROJECT_ENVIRONMENT if it is set, else `.venv` in the checkout."""
        return self.root / (os.environ.get("UV_PROJECT_ENVIRONMENT") or ".venv")

    @property
    def python(self) -> Path:
        """Path of its interpreter."""
        return self.environment / "bin" / "python"

    @property
    def rl(self) -> Path:
        """Path of the launcher that Prime-RL installs."""
        return self.environment / "bin" / "rl"

    @property
    def installed(self) -> bool:
        """Whether `rl` is installed."""
        return self.rl.is_file()

    def require_installed(self) -> None:
        """Check that Prime-RL is installed.

        Raises:
            UserError: The submodule is empty, or its environment is not installed.
        """
        if not self.populated:
            do = "run `git submodule update --init --recursive`, or use --engine local"
            raise UserError("Prime-RL's source is missing", where=str(self.root), do=do)
        if not self.installed:
            do = "create it as in docs/prime-rl.md, or use --engine local"
            raise UserError("Prime-RL's environment is not installed", where=str(self.environment), do=do)


def find() -> Checkout:
    """Return the checkout: the variable's, else `prime-rl/` beside the source, else in the current folder."""
    named = os.environ.get(VARIABLE)
    if named:
        return Checkout(Path(named).resolve())
    beside = SOURCE.parent / "prime-rl"
    return Checkout(beside if beside.is_dir() else Path.cwd() / "prime-rl")


def rl_command(checkout: Checkout, file: Path, overrides: Sequence[str]) -> list[str]:
    """Return the command as a list of arguments: with uv if it is available, else the installed `rl` itself."""
    uv = find_uv()
    start = [uv, "run", "--project", str(checkout.root), "--no-sync", "rl"] if uv else [str(checkout.rl)]
    return [*start, "@", str(file), *overrides]


def printed_command(checkout: Checkout, file: Path, overrides: Sequence[str]) -> str:
    """Return the command as a user types it, with relative paths where possible."""
    words = ["uv", "run", "--project", _short(checkout.root), "--no-sync", "rl", "@", _short(file), *overrides]
    return f"PYTHONPATH={shlex.quote(_short(SOURCE))} {shlex.join(words)}"


def rl_environment(checkout: Checkout, *, run: str, owner: str, trials: Path, key_file: Path) -> dict[str, str]:
    """Return the environment variables of `rl`: from `.env`, from this process, and the run's own.

    Later ones take precedence.

    Args:
        checkout: Prime-RL.
        run: The run's label.
        owner: The owner of its sandboxes (`runs.label`); "" for the processes that start them.
        trials: Folder for the trials.
        key_file: The run's key file, which the orchestrator and the env servers read.
    """
    path = [str(checkout.rl.parent), os.environ.get("PATH", "")]
    source = [str(SOURCE), os.environ.get("PYTHONPATH", "")]
    own = {
        RUN_VARIABLE: run,
        OWNER_VARIABLE: owner,
        TRIALS_DIR_VARIABLE: str(trials),
        RUN_KEY_FILE_VARIABLE: str(key_file),
        "PYTHONPATH": os.pathsep.join(part for part in source if part),
        "PATH": os.pathsep.join(part for part in path if part),
        **LITELLM_OFFLINE,
        "PYTHONUNBUFFERED": "1",
        # Prime-RL's processes rename themselves. Without this, that overwrites the environment by which we find them.
        "SPT_NOENV": "1",
    }
    variables = dotenv() | dict(os.environ) | own
    bypass_proxies([], variables)
    return variables


def dotenv() -> dict[str, str]:
    """Return the variables of `.env` in the current folder."""
    return {key: value for key, value in dotenv_values(".env").items() if value is not None}


def apply_dotenv() -> None:
    """Set the variables of `.env` that this process does not have."""
    os.environ.update({key: value for key, value in dotenv().items() if key not in os.environ})


def find_uv() -> str | None:
    """Return the uv that the Makefile installed, else the one on the path; None if neither runs."""
    candidates = [str(SOURCE.parent / ".tools" / "uv"), shutil.which("uv")]
    return next((uv for uv in candidates if uv is not None and program_output(uv, "--version") is not None), None)


def _short(path: Path) -> str:
    path = path.resolve()
    here = Path.cwd()
    return str(path.relative_to(here)) if path.is_relative_to(here) else str(path)
