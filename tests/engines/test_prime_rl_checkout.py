"""Where Prime-RL lies, and that the submodule is pinned to the commit that everything else is written for."""

import configparser
import subprocess
from pathlib import Path

import pytest

from harbortrainer.engines.prime_rl.checkout import PIN, VARIABLE, Checkout, find
from harbortrainer.errors import UserError

ROOT = Path(__file__).parents[2]


def test_the_submodule_is_pinned_to_the_commit_that_the_code_names():
    done = subprocess.run(["git", "ls-tree", "HEAD", "prime-rl"], cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip("not a git checkout")
    assert done.stdout.split()[:3] == ["160000", "commit", PIN]


def test_the_submodule_comes_from_prime_intellect():
    modules = configparser.ConfigParser()
    modules.read_string("\n".join(line.strip() for line in (ROOT / ".gitmodules").read_text().splitlines()))
    section = modules['submodule "prime-rl"']
    assert (section["path"], section["url"]) == ("prime-rl", "https://github.com/PrimeIntellect-ai/prime-rl")


def test_the_variable_names_another_checkout(tmp_path, monkeypatch):
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    assert find().root == tmp_path
    monkeypatch.delenv(VARIABLE)
    assert find().root == ROOT / "prime-rl"


def test_what_is_missing_is_told_with_what_to_do(tmp_path):
    with pytest.raises(UserError, match="git submodule update --init --recursive"):
        Checkout(tmp_path).need()
    (tmp_path / "pyproject.toml").write_text("")
    with pytest.raises(UserError, match=r"docs/prime-rl\.md"):
        Checkout(tmp_path).need()
    rl = tmp_path / ".venv" / "bin" / "rl"
    rl.parent.mkdir(parents=True)
    rl.write_text("")
    Checkout(tmp_path).need()


def test_the_environment_is_where_uv_puts_it(tmp_path, monkeypatch):
    monkeypatch.setenv("UV_PROJECT_ENVIRONMENT", str(tmp_path / "venv"))
    assert Checkout(tmp_path / "prime-rl").rl == tmp_path / "venv" / "bin" / "rl"
