"""The Prime-RL checkout: its place, its environment, and the pinned commit."""

import configparser
import subprocess
from pathlib import Path

import pytest

from harbortrainer.doctor.engine_checks import pinned
from harbortrainer.doctor.finding import Level
from harbortrainer.engines.prime_rl.checkout import PIN, SCHEMA, VARIABLE, Checkout, find
from harbortrainer.errors import UserError

ROOT = Path(__file__).parents[2]


def test_submodule_commit_matches_pin():
    done = subprocess.run(["git", "ls-tree", "HEAD", "prime-rl"], cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip("not a git checkout")
    assert done.stdout.split()[:3] == ["160000", "commit", PIN]


def test_submodule_url():
    modules = configparser.ConfigParser()
    modules.read_string("\n".join(line.strip() for line in (ROOT / ".gitmodules").read_text().splitlines()))
    section = modules['submodule "prime-rl"']
    assert (section["path"], section["url"]) == ("prime-rl", "https://github.com/PrimeIntellect-ai/prime-rl")


def test_variable_selects_another_checkout(tmp_path, monkeypatch):
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    assert find().root == tmp_path
    monkeypatch.delenv(VARIABLE)
    assert find().root == ROOT / "prime-rl"


def test_missing_checkout_error_has_remedy(tmp_path):
    with pytest.raises(UserError, match="git submodule update --init --recursive"):
        Checkout(tmp_path).require_installed()
    (tmp_path / "pyproject.toml").write_text("")
    with pytest.raises(UserError, match=r"docs/prime-rl\.md"):
        Checkout(tmp_path).require_installed()
    rl = tmp_path / ".venv" / "bin" / "rl"
    rl.parent.mkdir(parents=True)
    rl.write_text("")
    Checkout(tmp_path).require_installed()


@pytest.mark.parametrize(
    ("schema", "release"),
    [
        ("class CurriculumConfig:\n    algo: AlgoConfig", "pin"),
        ("class SourceGroupConfig:\n    constant_trainer_batch_size: bool", "v0.9"),
    ],
)
def test_release_of_a_checkout(tmp_path, schema, release):
    assert write_schema(tmp_path, schema).release == release


def test_checkout_between_the_supported_releases_is_refused(tmp_path):
    checkout = write_schema(tmp_path, "class CurriculumConfig:\n    pass\n    constant_trainer_batch_size: bool")
    with pytest.raises(UserError, match="between the two supported generations; check out 559b44772, or") as caught:
        _ = checkout.release
    assert caught.value.where == str(tmp_path)
    assert pinned(checkout).level == Level.RED


def write_schema(root: Path, text: str) -> Checkout:
    """Return a checkout with this schema of `[orchestrator]`."""
    (root / SCHEMA).parent.mkdir(parents=True)
    (root / SCHEMA).write_text(text)
    return Checkout(root)


def test_environment_is_where_uv_puts_it(tmp_path, monkeypatch):
    monkeypatch.setenv("UV_PROJECT_ENVIRONMENT", str(tmp_path / "venv"))
    assert Checkout(tmp_path / "prime-rl").rl == tmp_path / "venv" / "bin" / "rl"
