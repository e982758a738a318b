"""What the tests of the plugin share."""

from pathlib import Path

import pytest


@pytest.fixture
def sample_tasks() -> str:
    return str(Path(__file__).parents[2] / "datasets" / "harbor_tasks")
