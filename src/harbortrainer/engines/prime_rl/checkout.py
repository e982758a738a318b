"""Where Prime-RL lies: the submodule, or what `HARBORTRAINER_PRIME_RL` names."""

import os
from dataclasses import dataclass
from pathlib import Path

from harbortrainer.errors import UserError

PIN = "559b44772e471d1538537b8805cc77f3824a5e64"
"""The commit the plugin and the configs are written for."""

VARIABLE = "HARBORTRAINER_PRIME_RL"
SOURCE = Path(__file__).resolve().parents[3]
"""The folder that holds the plugin, `harbor_env.py`; it goes on PYTHONPATH."""


@dataclass(frozen=True)
class Checkout:
    """A checkout of Prime-RL.

    Args:
        root: Its folder; may be empty or missing.
    """

    root: Path

    @property
    def populated(self) -> bool:
        """Whether the source is there."""
        return (self.root / "pyproject.toml").is_file()

    @property
    def schema(self) -> Path:
        """The folder that makes `prime_rl.configs` importable, light, without torch or vLLM."""
        return self.root / "packages" / "prime-rl-configs" / "src"

    @property
    def environment(self) -> Path:
        """Its virtual environment; uv puts it where UV_PROJECT_ENVIRONMENT says, else into the checkout."""
        return self.root / (os.environ.get("UV_PROJECT_ENVIRONMENT") or ".venv")

    @property
    def rl(self) -> Path:
        """The launcher that Prime-RL installs."""
        return self.environment / "bin" / "rl"

    @property
    def installed(self) -> bool:
        """Whether `rl` can be run."""
        return self.rl.is_file()

    def need(self) -> None:
        """Refuse to go on without Prime-RL.

        Raises:
            UserError: The submodule is empty, or its environment was not made.
        """
        if not self.populated:
            do = "run `git submodule update --init --recursive`, or use --engine local"
            raise UserError("Prime-RL's source is not here", where=str(self.root), do=do)
        if not self.installed:
            do = "make its environment as docs/prime-rl.md says, or use --engine local"
            raise UserError("Prime-RL's environment is not there", where=str(self.environment), do=do)


def find(start: Path | None = None) -> Checkout:
    """Prime-RL as it is set up here: the variable, else `prime-rl/` beside the source, else in the current folder."""
    named = os.environ.get(VARIABLE)
    if named:
        return Checkout(Path(named).resolve())
    beside = SOURCE.parent / "prime-rl"
    return Checkout(beside if beside.is_dir() else (start or Path.cwd()) / "prime-rl")
