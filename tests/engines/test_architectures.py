"""Architectures of transformers: samples match a plain forward pass, and train; the others are refused.

Some architectures are always tested; `--long` tests every one in the table of docs/local-engine.md.
"""

import re
from pathlib import Path

import pytest
import torch
import transformers
from logprob_check_rig import LogprobCheckRig
from model_kinds import small_model, unreadable_model
from sampler_setup import PROMPT, Reference, agrees, generate
from transformers import AutoModelForCausalLM

from harbortrainer.config.trainer_table import LoraSettings
from harbortrainer.engines.local.learner.policies import LoraPolicy
from harbortrainer.engines.local.sampler import Sampler
from harbortrainer.engines.memory_count import plan_memory
from harbortrainer.errors import UserError

PAGE = (Path(__file__).parents[2] / "docs/local-engine.md").read_text()
TABLE = {
    label: kinds.split(", ")
    for label, kinds in re.findall(r"^\| ([^|]+) \| `([a-z0-9_, ]+)` \|$", PAGE, re.MULTILINE)
    if label.startswith(("continuous batching", "`generate`", "refused"))
}
TRAINED, TRAINED_IF_NAMED, PLAIN, PLAIN_IF_NAMED, FLOAT32_ONLY, FAILS_SELF_CHECK = TABLE.values()
ALWAYS_TESTED = {"llama", "qwen2", "qwen3_moe", "mistral", "gemma3", "phi3", "smollm3", "olmo3", "glm4", "qwen3_5"}
"""Architectures tested in every run."""
SLOW = {"kimi_linear"}
"""Three steps take five minutes, because transformers computes it token by token without its kernel."""
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
FUSED, MAMBA = ["query_key_value", "dense"], ["in_proj"]
LAYERS = dict.fromkeys([*TRAINED_IF_NAMED, *PLAIN_IF_NAMED], ATTENTION) | {
    "gpt2": ["lm_head"],
    **dict.fromkeys(["gpt_neox", "bloom", "falcon"], FUSED),
    **dict.fromkeys([*FLOAT32_ONLY, "granitemoehybrid"], MAMBA),
}
"""`target_modules` of architectures that do not train with the default."""


def test_docs_table_lists_each_architecture_once() -> None:
    kinds = [kind for row in TABLE.values() for kind in row]
    version = ".".join(transformers.__version__.split(".")[:2])
    assert len(kinds) == len(set(kinds))
    assert f"Tiny random models of {len(kinds)} architectures of transformers {version} were" in " ".join(PAGE.split())
    assert ALWAYS_TESTED.issubset(TRAINED + PLAIN)


def samples_match_forward_pass(folder: Path) -> bool:
    """Return whether sampled log-probabilities match a plain forward pass, in two turns."""
    plain = Reference(folder)
    with Sampler(folder, max_model_len=256) as sampler:
        first = generate(sampler.url, PROMPT, max_tokens=20, ignore_eos=True)
        turn = [*PROMPT, *first["token_ids"], 5, 6, 7]
        second = generate(sampler.url, turn, max_tokens=20, ignore_eos=True)
    return agrees(first, plain) and agrees(second, plain, turn)


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, marks=() if kind in ALWAYS_TESTED else pytest.mark.long)
        for kind in [*TRAINED, *PLAIN, *PLAIN_IF_NAMED, *FLOAT32_ONLY]
    ],
)
def test_sampled_logprobs_match_plain_forward_pass(tmp_path, kind):
    assert samples_match_forward_pass(small_model(tmp_path, kind))


@pytest.mark.long
@pytest.mark.parametrize("kind", TRAINED)
def test_trains_with_default_target_modules(tmp_path, kind):
    assert failed_check_step(small_model(tmp_path, kind), LoraSettings(rank=4, alpha=8)) is None


@pytest.mark.long
@pytest.mark.parametrize("kind", TRAINED_IF_NAMED)
def test_trains_with_named_target_modules(tmp_path, kind):
    folder = small_model(tmp_path, kind)
    with pytest.raises(UserError, match="target_modules"):
        plan_memory(folder, LoraSettings(), device_type="cpu", capacity=2**33)
    assert samples_match_forward_pass(folder)
    assert failed_check_step(folder, LoraSettings(rank=4, alpha=8, target_modules=LAYERS[kind])) is None


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, marks=() if kind in ALWAYS_TESTED else pytest.mark.long)
        for kind in [*PLAIN, *PLAIN_IF_NAMED, *FLOAT32_ONLY]
        if kind not in SLOW
    ],
)
def test_trains_what_generate_samples(tmp_path, kind, dtype):
    if kind in FLOAT32_ONLY and dtype != "float32":
        pytest.skip("transformers' own Mamba mixes number formats in bfloat16")
    lora = LoraSettings(rank=4, alpha=8)
    if kind in LAYERS:
        lora = lora.model_copy(update={"target_modules": LAYERS[kind]})
    assert failed_check_step(small_model(tmp_path, kind), lora, dtype) is None


def failed_check_step(folder: Path, lora: LoraSettings, dtype: str = "float32") -> int | None:
    """Train three steps with weight updates; return the step at which the log-probability check failed, or None."""
    plan_memory(folder, lora, device_type="cpu", capacity=2**33)
    return LogprobCheckRig(folder, dtype, [PROMPT[:30], PROMPT], max_tokens=16, lora=lora).stopped_at(3)


def test_refuses_model_without_causal_language_model_before_loading_weights(tmp_path):
    unreadable_model(tmp_path, "siglip")
    remedy = 'train it on Prime-RL, or set engine = "vllm" in [inference] on a machine with a GPU'
    reason = "transformers has no causal language model of type siglip"
    message = f"the embedded engine cannot sample from {tmp_path}: {reason}; {remedy}"
    with pytest.raises(UserError) as refused:
        Sampler(tmp_path, max_model_len=256).start()
    assert str(refused.value) == message
    with pytest.raises(UserError) as refused:
        plan_memory(tmp_path, LoraSettings(), device_type="cpu", capacity=2**33)
    assert str(refused.value) == f"model.name: {message}"


@pytest.mark.parametrize("kind", FAILS_SELF_CHECK)
def test_self_check_detects_model_that_ignores_cache(tmp_path, kind):
    sampler = Sampler(small_model(tmp_path, kind), max_model_len=256)
    error = "sampling token by token and one pass over the whole text give different log-probabilities"
    with pytest.raises(UserError, match=error + r" \(\d\.\d\d nats apart"):
        sampler.start()
    sampler.stop()


def test_self_check_is_not_counted(tmp_path):
    with Sampler(small_model(tmp_path, "llama"), max_model_len=256) as sampler:
        counted = {name: value for name, value in sampler.stats().items() if name != "cache_tokens"}
        assert not any(counted.values()) and sampler.rescore() == []


@pytest.mark.parametrize("names", [["q_proj", "gate_proj", "up_proj", "down_proj"], ["gate_proj"]])
def test_refuses_target_modules_of_stacked_experts(tmp_path, names):
    base = AutoModelForCausalLM.from_pretrained(small_model(tmp_path, "glm4_moe"))
    refused = "peft adapts this model's stacked experts instead of the layers with these names"
    with pytest.raises(UserError, match=refused):
        LoraPolicy(base, LoraSettings(rank=2, target_modules=names), device=torch.device("cpu"), seed=0)


def test_refuses_layers_that_peft_cannot_adapt(tmp_path):
    base = AutoModelForCausalLM.from_pretrained(small_model(tmp_path, "mamba2"))
    lora = LoraSettings(rank=2, target_modules=["in_proj", "out_proj"])
    with pytest.raises(UserError, match=r"these layers of mamba2: .*out_proj.*; leave them out") as refused:
        LoraPolicy(base, lora, device=torch.device("cpu"), seed=0)
    assert refused.value.where == "trainer.model.lora.target_modules"
