"""What the doctor says of a model that the embedded engine cannot sample from."""

from typing import Any

import pytest
from transformers import CONFIG_MAPPING

from harbortrainer.doctor import architecture
from harbortrainer.doctor.finding import Level


@pytest.fixture
def policy(tmp_path):
    """The folder of a model with nothing but its config."""

    def save(kind: str) -> str:
        made: Any = CONFIG_MAPPING[kind]
        made(num_hidden_layers=4).save_pretrained(tmp_path / kind)
        return str(tmp_path / kind)

    return save


def test_a_kind_that_cannot_be_batched_is_red_with_the_key_that_named_it(plan, policy):
    (finding,) = architecture.check(plan(model={"name": policy("qwen3_5_text")}))
    assert finding.level is Level.RED and "Qwen3_5ForCausalLM has layers of linear_attention" in finding.what
    assert finding.where == "run.toml: model.name" and "Prime-RL" in finding.do


def test_a_config_that_cannot_be_read_is_red(plan, policy, tmp_path):
    folder = policy("qwen3")
    (tmp_path / "qwen3" / "config.json").write_text("{")
    (finding,) = architecture.check(plan(model={"name": folder}))
    assert finding.level is Level.RED and "the model's config cannot be read" in finding.what


def test_a_kind_that_transformers_has_no_language_model_of_is_red(plan, policy):
    (finding,) = architecture.check(plan(model={"name": policy("siglip")}))
    assert finding.what.endswith("transformers has no causal language model of the kind siglip")


def test_nothing_is_said_of_a_kind_that_can_nor_where_another_engine_samples(plan, policy):
    assert list(architecture.check(plan(model={"name": policy("qwen3")}))) == []
    unsampled = {"model": {"name": policy("gpt_oss")}}
    assert len(list(architecture.check(plan(**unsampled)))) == 1
    assert list(architecture.check(plan("prime-rl", **unsampled))) == []
    assert list(architecture.check(plan(inference={"engine": "vllm"}, **unsampled))) == []


def test_a_policy_that_a_warm_up_starts_from_is_looked_at(plan, policy):
    (finding,) = architecture.check(plan(warmup={"tasks": "tasks", "model": policy("mamba")}))
    assert finding.where == "run.toml: warmup.model" and "MambaForCausalLM" in finding.what
