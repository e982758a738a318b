"""Fixtures of the end-to-end tests."""

from pathlib import Path

import pytest
from scripted_engine import save_tokenizer


@pytest.fixture(scope="session")
def tokenizer_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small tokenizer with a chat template without reasoning."""
    return save_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="session")
def thinking_tokenizer_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same tokenizer with a chat template that keeps reasoning in the history."""
    return save_tokenizer(tmp_path_factory.mktemp("thinking-tokenizer"), thinking=True)
