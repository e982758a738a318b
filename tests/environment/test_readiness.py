"""Preparation of a trial's model, with tokenizers that load and that do not."""

import json

import pytest
from tiny_model import build_tiny_tokenizer
from verifiers.v1.clients import ModelContext
from verifiers.v1.configs.client import TrainClientConfig

from harbortrainer.environment import model_server
from harbortrainer.environment.model_server import Readiness
from harbortrainer.environment.plugin_config import HarborHarnessConfig
from harbortrainer.environment.verifiers_compat import SamplingConfig

LIMIT = 5000


def model_of(folder) -> ModelContext:
    client = TrainClientConfig(base_url="http://127.0.0.1:9/v1", renderer_model_name=str(folder))
    return ModelContext(client=client, model="policy", sampling=SamplingConfig())


@pytest.fixture
def ready() -> Readiness:
    return Readiness(HarborHarnessConfig(id="harbor_env", context_limit=LIMIT))


async def test_loadable_tokenizer_gives_no_warning(ready, tmp_path, caplog):
    build_tiny_tokenizer().save_pretrained(tmp_path)
    assert await ready.prepare(model_of(tmp_path)) == LIMIT
    assert "cannot be loaded" not in caplog.text


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("tokenizer.json", None),  # OSError or ValueError
        ("tokenizer.json", "no JSON"),  # ValueError
        ("tokenizer.json", "{}"),  # KeyError
        ("tokenizer.json", "[]"),  # TypeError
        ("tokenizer.json", "null"),  # AttributeError
        ("tokenizer.json", json.dumps({"added_tokens": [], "model": {"type": "Newer"}})),  # a plain Exception
        ("tokenizer_config.json", "[]"),  # AttributeError
    ],
)
async def test_unloadable_tokenizer_is_a_warning(ready, tmp_path, caplog, file, content):
    build_tiny_tokenizer().save_pretrained(tmp_path)
    if content is None:
        (tmp_path / file).unlink()
    else:
        (tmp_path / file).write_text(content)
    assert await ready.prepare(model_of(tmp_path)) == LIMIT
    assert "the tokenizer of policy cannot be loaded" in caplog.text


async def test_missing_tokenizer_is_a_warning(ready, tmp_path, caplog):
    assert await ready.prepare(model_of(tmp_path / "none")) == LIMIT
    assert "the tokenizer of policy cannot be loaded" in caplog.text


async def test_other_errors_are_raised(ready, tmp_path, monkeypatch):
    async def fail(ctx: ModelContext) -> None:
        raise AssertionError("a fault of ours")

    monkeypatch.setattr(model_server, "load_renderer", fail)
    with pytest.raises(AssertionError, match="a fault of ours"):
        await ready.prepare(model_of(tmp_path))
