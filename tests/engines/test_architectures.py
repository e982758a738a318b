"""Architectures of transformers: samples match a plain forward pass, or the architecture is refused.

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
    label: kinds.split(", ") for label, kinds in re.findall(r"^\| ([^|]+) \| `([a-z0-9_, ]+)` \|$", PAGE, re.MULTILINE)
    if label.startswith(("sampled and trained", "refused"))
}  # fmt: skip
(
    TRAINED,
    TRAINED_IF_NAMED,
    OTHER_LAYER_TYPES,
    CUSTOM_ATTENTION,
    UNEQUAL_WIDTHS,
    DIFFERING_LAYERS,
    FAILS_SELF_CHECK,
) = TABLE.values()
ALWAYS_TESTED = {"llama", "qwen2", "qwen3_moe", "mistral", "gemma3", "phi3", "smollm3", "olmo3", "glm4"}
"""Architectures tested in every run."""
REFUSALS = {
    **dict.fromkeys(OTHER_LAYER_TYPES, r"layers of type \w+(, \w+)*; only full and sliding attention are supported"),
    **dict.fromkeys(CUSTOM_ATTENTION, "a custom attention that cannot be replaced"),
    **dict.fromkeys(UNEQUAL_WIDTHS, "values and keys of different widths, which is not supported"),
    **dict.fromkeys(DIFFERING_LAYERS, "layers that differ in head_dim, which is not supported"),
}
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
LAYERS = dict.fromkeys(TRAINED_IF_NAMED, ATTENTION) | {
    "gpt2": ["lm_head"],
    "gpt_neox": ["query_key_value", "dense"],
}
"""`target_modules` of architectures that do not train with the default."""


def test_docs_table_lists_each_architecture_once() -> None:
    kinds = [kind for row in TABLE.values() for kind in row]
    version = ".".join(transformers.__version__.split(".")[:2])
    assert len(kinds) == len(set(kinds))
    assert f"tiny random models of {len(kinds)} architectures of transformers {version} it" in " ".join(PAGE.split())
    assert ALWAYS_TESTED.issubset(TRAINED)


def samples_match_forward_pass(folder: Path) -> bool:
    """Return whether sampled log-probabilities match a plain forward pass, in two turns."""
    plain = Reference(folder)
    with Sampler(folder, max_model_len=256) as sampler:
        first = generate(sampler.url, PROMPT, max_tokens=20, ignore_eos=True)
        turn = [*PROMPT, *first["token_ids"], 5, 6, 7]
        second = generate(sampler.url, turn, max_tokens=20, ignore_eos=True)
    return agrees(first, plain) and agrees(second, plain, turn)


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=() if kind in ALWAYS_TESTED else pytest.mark.long) for kind in TRAINED]
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


def failed_check_step(folder: Path, lora: LoraSettings) -> int | None:
    """Train three steps with weight updates; return the step at which the log-probability check failed, or None."""
    plan_memory(folder, lora, device_type="cpu", capacity=2**33)
    return LogprobCheckRig(folder, "float32", [PROMPT[:30], PROMPT], max_tokens=16, lora=lora).stopped_at(3)


@pytest.mark.parametrize("kind", REFUSALS)
def test_refuses_unsupported_architecture_before_loading_weights(tmp_path, kind):
    unreadable_model(tmp_path, kind)
    remedy = 'train it on Prime-RL, or set engine = "vllm" in [inference] on a machine with a GPU'
    prefix = re.escape(f"the embedded engine cannot sample from {tmp_path}: ")
    message = rf"{prefix}\w+ForCausalLM has {REFUSALS[kind]}; {re.escape(remedy)}"
    with pytest.raises(UserError) as refused:
        Sampler(tmp_path, max_model_len=256).start()
    assert re.fullmatch(message, str(refused.value))
    with pytest.raises(UserError) as refused:
        plan_memory(tmp_path, LoraSettings(), device_type="cpu", capacity=2**33)
    assert re.fullmatch(rf"model\.name: {message}", str(refused.value))


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
