"""A plain `pip install` of the built wheel brings releases that the plugin imports with, and no pre-release."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
PUBLISHED = {"verifiers": ["0.3.1.dev62", "0.3.1", "0.3.2.dev210", "0.4.0", "0.4.1.dev1", "0.4.1.dev86", "0.4.1rc1"]}


def required(name: str) -> Requirement:
    lines = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["dependencies"]
    return next(found for found in map(Requirement, lines) if found.name == name)


def test_newest_verifiers_in_range_is_stable() -> None:
    """A specifier that names a pre-release admits them all; below 0.4.1 the newest is 0.4.0."""
    admitted = list(required("verifiers").specifier.filter(PUBLISHED["verifiers"]))
    assert admitted[0] == "0.3.1.dev62", "Prime-RL's own release is out of the range"
    assert admitted[-1] == "0.4.0"


@pytest.mark.long
def test_plugin_imports_after_plain_pip_install(tmp_path: Path) -> None:
    def run(*command: object) -> str:
        done = subprocess.run([*map(str, command)], capture_output=True, text=True, check=False, cwd=tmp_path)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
        return done.stdout.strip()

    run(ROOT / ".tools/uv", "build", "--quiet", "--wheel", "--python", sys.executable, "-o", tmp_path / "dist", ROOT)
    run(sys.executable, "-m", "venv", tmp_path / "venv")
    python = tmp_path / "venv/bin/python"
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    run(python, "-m", "pip", "install", "--quiet", "--no-compile", wheel)
    release = run(
        python, "-c", "import harbor_env; from importlib.metadata import version; print(version('verifiers'))"
    )
    assert list(required("verifiers").specifier.filter([release])) == [release]
    assert "dev" not in release
