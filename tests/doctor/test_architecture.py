"""Findings on models that the embedded engine cannot sample from, or only slowly."""

from typing import Any

import pytest
from transformers import CONFIG_MAPPING

from harbortrainer.doctor import policy_checks
from harbortrainer.doctor.finding import Level
from harbortrainer.engines.engine_choice import Gpu


@pytest.fixture
def policy(tmp_path):
    """Create a model folder that holds only a config."""

    def save(kind: str) -> str:
        made: Any = CONFIG_MAPPING[kind]
        made(num_hidden_layers=4).save_pretrained(tmp_path / kind)
        return str(tmp_path / kind)

    return save


def test_architecture_without_continuous_batching_is_yellow_on_a_gpu(plan, policy):
    sampled = {"model": {"name": policy("qwen3_5_text")}}
    (finding,) = policy_checks.check_architecture(plan(gpus=[Gpu("NVIDIA H100", 80_000)], **sampled))
    assert finding.level is Level.YELLOW and "layers of type linear_attention" in finding.what
    assert finding.where == "run.toml: inference.engine" and "vllm" in finding.do
    assert list(policy_checks.check_architecture(plan(**sampled))) == [], "nothing can be done without a GPU"


def test_unreadable_config_is_red(plan, policy, tmp_path):
    folder = policy("qwen3")
    (tmp_path / "qwen3" / "config.json").write_text("{")
    (finding,) = policy_checks.check_architecture(plan(model={"name": folder}))
    assert finding.level is Level.RED and "the model's config cannot be read" in finding.what


def test_architecture_without_language_model_is_red(plan, policy):
    (finding,) = policy_checks.check_architecture(plan(model={"name": policy("siglip")}))
    assert finding.what.endswith("transformers has no causal language model of type siglip")


def test_supported_architecture_or_other_sampler_has_no_finding(plan, policy):
    assert list(policy_checks.check_architecture(plan(model={"name": policy("qwen3")}))) == []
    unsampled = {"model": {"name": policy("siglip")}}
    assert len(list(policy_checks.check_architecture(plan(**unsampled)))) == 1
    assert list(policy_checks.check_architecture(plan("prime-rl", **unsampled))) == []
    assert list(policy_checks.check_architecture(plan(inference={"engine": "vllm"}, **unsampled))) == []


def test_base_model_of_a_warmup_is_checked(plan, policy):
    (finding,) = policy_checks.check_architecture(plan(warmup={"tasks": "tasks", "model": policy("siglip")}))
    assert finding.where == "run.toml: warmup.model" and "siglip" in finding.what
