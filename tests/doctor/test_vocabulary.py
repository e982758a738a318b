"""A tokenizer with tokens that the model lacks is found before trials need them."""

from pathlib import Path

import pytest
from tiny_model import build_tiny_model, build_tiny_tokenizer

from harbortrainer.doctor import checks
from harbortrainer.doctor.finding import Level
from harbortrainer.engines.local.sampler import Sampler
from harbortrainer.errors import UserError

pytestmark = pytest.mark.torch


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return build_tiny_model(tmp_path / "policy", vocab=270)


def vocabulary_findings(plan, folder: Path) -> list:
    found = checks.examine_policy(plan(model={"name": str(folder)}, orchestrator={"renderer": {"name": "default"}}))
    return [finding for finding in found if finding.about == "model"]


def test_larger_tokenizer_is_red(plan, model: Path) -> None:
    build_tiny_tokenizer(320).save_pretrained(model)
    (finding,) = vocabulary_findings(plan, model)
    assert finding.level is Level.RED and finding.where == "run.toml: model.name"
    assert f"tokens that the model {model} of 270 tokens lacks: {len(build_tiny_tokenizer(320)) - 270}" in finding.what
    with pytest.raises(UserError, match="of 270 tokens lacks"):
        Sampler(model)


def test_chat_format_with_tokens_beyond_model_is_red(plan, model: Path) -> None:
    """A fine-tune that added ChatML to the tokenizer, but no embeddings."""
    tokenizer = build_tiny_tokenizer(270)
    tokenizer.add_tokens([f"<|role{number}|>" for number in range(3)], special_tokens=True)
    tokenizer.chat_template = str(tokenizer.chat_template).replace("<|im_start|>", "<|role2|>")
    tokenizer.save_pretrained(model)
    (finding,) = vocabulary_findings(plan, model)
    assert finding.level is Level.RED and "lacks: 1, e.g. '<|role2|>'" in finding.what


def test_unused_added_token_is_accepted(plan, model: Path) -> None:
    """Many published models add a padding token that no text contains."""
    tokenizer = build_tiny_tokenizer(270)
    tokenizer.add_special_tokens({"pad_token": "<pad>"})
    tokenizer.save_pretrained(model)
    assert len(tokenizer) > 270
    assert vocabulary_findings(plan, model) == []
    Sampler(model).stop()


def test_smaller_tokenizer_is_accepted(plan, tmp_path: Path) -> None:
    """Many published models have padded embeddings."""
    model = build_tiny_model(tmp_path / "padded", vocab=320)
    build_tiny_tokenizer(270).save_pretrained(model)
    assert vocabulary_findings(plan, model) == []
