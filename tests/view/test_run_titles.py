"""The model in the title of a run: of a policy that a warm-up made, what it was made from."""

from pathlib import Path

import pytest

from harbortrainer.view.run_folders import EmbeddedFolder


@pytest.mark.parametrize(
    ("config", "model"),
    [
        ('model.name = "Qwen/Qwen3-8B"', "Qwen/Qwen3-8B"),
        ('model.name = "warmup"\nwarmup.model = "HuggingFaceTB/SmolLM2"', "HuggingFaceTB/SmolLM2 (warm-up)"),
        ('model.name = "warmup"\nwarmup.family = "make_tasks.py"', "tiny policy (warm-up)"),
        ("", "unknown"),
    ],
)
def test_title_names_the_model(tmp_path: Path, config: str, model: str) -> None:
    (tmp_path / "config.toml").write_text(config)
    assert (EmbeddedFolder().head(tmp_path).model or "unknown") == model
