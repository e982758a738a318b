"""Models of other makers' kinds: what is sampled is what a plain forward pass says, or the kind is refused by name.

Some kinds always, and with `--long` each one of the table in docs/local-engine.md, which is read from there.
"""

import re
from pathlib import Path

import pytest
import torch
import transformers
from model_kinds import small_model, unreadable_model
from proof_rig import ProofRig
from sampler_setup import PROMPT, Reference, agrees, generate
from transformers import AutoModelForCausalLM

from harbortrainer.config.trainer_table import LoraSettings
from harbortrainer.engines.local.learner.lora_policy import LoraPolicy
from harbortrainer.engines.local.sampler import Sampler
from harbortrainer.engines.memory_count import plan_memory
from harbortrainer.errors import UserError

PAGE = (Path(__file__).parents[2] / "docs/local-engine.md").read_text()
TABLE = {
    label: kinds.split(", ") for label, kinds in re.findall(r"^\| ([^|]+) \| ([a-z0-9_, ]+) \|$", PAGE, re.MULTILINE)
    if label.startswith(("sampled and trained", "refused"))
}  # fmt: skip
TRAINED, TRAINED_IF_NAMED, OF_STATES, OF_ITS_OWN, OF_WIDTHS, UNLIKE, AT_THE_START = TABLE.values()
OFTEN = {"llama", "qwen2", "qwen3_moe", "mistral", "gemma3", "phi3", "smollm3", "olmo3", "glm4"}
"""Kinds that are sampled from in every run of the tests."""
WHY_REFUSED = {
    **dict.fromkeys(OF_STATES, r"layers of \w+(, \w+)*; only full and sliding attention is batched"),
    **dict.fromkeys(OF_ITS_OWN, "an attention of its own, which cannot be batched"),
    **dict.fromkeys(OF_WIDTHS, "values of another width than its keys, which are not batched"),
    **dict.fromkeys(UNLIKE, "layers that differ in head_dim, which are not batched"),
}
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
LAYERS = dict.fromkeys(TRAINED_IF_NAMED, ATTENTION) | {
    "gpt2": ["lm_head"],
    "gpt_neox": ["query_key_value", "dense"],
}
"""What those are told to adapt that do not train as they are."""


def test_the_table_has_each_kind_once_and_says_how_many_and_of_which_transformers() -> None:
    kinds = [kind for row in TABLE.values() for kind in row]
    version = ".".join(transformers.__version__.split(".")[:2])
    assert len(kinds) == len(set(kinds))
    assert f"tiny random models of {len(kinds)} kinds of transformers {version} it" in " ".join(PAGE.split())
    assert OFTEN.issubset(TRAINED)


def says_what_it_computes(folder: Path) -> bool:
    """Whether what is sampled is what a plain forward pass says, in a second turn too."""
    plain = Reference(folder)
    with Sampler(folder, max_model_len=256) as sampler:
        first = generate(sampler.url, PROMPT, max_tokens=20, ignore_eos=True)
        turn = [*PROMPT, *first["token_ids"], 5, 6, 7]
        second = generate(sampler.url, turn, max_tokens=20, ignore_eos=True)
    return agrees(first, plain) and agrees(second, plain, turn)


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=() if kind in OFTEN else pytest.mark.long) for kind in TRAINED]
)
def test_what_is_sampled_is_what_a_plain_forward_pass_says(tmp_path, kind):
    assert says_what_it_computes(small_model(tmp_path, kind))


@pytest.mark.long
@pytest.mark.parametrize("kind", TRAINED)
def test_it_trains_as_it_is(tmp_path, kind):
    assert stopped_at(small_model(tmp_path, kind), LoraSettings(rank=4, alpha=8)) is None


@pytest.mark.long
@pytest.mark.parametrize("kind", TRAINED_IF_NAMED)
def test_it_trains_with_layers_that_it_has(tmp_path, kind):
    folder = small_model(tmp_path, kind)
    with pytest.raises(UserError, match="target_modules"):
        plan_memory(folder, LoraSettings(), kind="cpu", room=2**33)
    assert says_what_it_computes(folder)
    assert stopped_at(folder, LoraSettings(rank=4, alpha=8, target_modules=LAYERS[kind])) is None


def stopped_at(folder: Path, lora: LoraSettings) -> int | None:
    """The step of three, with their hand-overs, at which the proof stopped it."""
    plan_memory(folder, lora, kind="cpu", room=2**33)
    return ProofRig(folder, "float32", [PROMPT[:30], PROMPT], max_tokens=16, lora=lora).stopped_at(3)


@pytest.mark.parametrize("kind", WHY_REFUSED)
def test_a_kind_that_cannot_be_batched_is_refused_by_name_before_a_weight_is_loaded(tmp_path, kind):
    unreadable_model(tmp_path, kind)
    do = 'train it on Prime-RL, or set engine = "vllm" in [inference] on a machine with a GPU'
    cannot = re.escape(f"the embedded engine cannot sample from {tmp_path}: ")
    said = rf"{cannot}\w+ForCausalLM has {WHY_REFUSED[kind]}; {re.escape(do)}"
    with pytest.raises(UserError) as refused:
        Sampler(tmp_path, max_model_len=256).start()
    assert re.fullmatch(said, str(refused.value))
    with pytest.raises(UserError) as refused:
        plan_memory(tmp_path, LoraSettings(), kind="cpu", room=2**33)
    assert re.fullmatch(rf"model\.name: {said}", str(refused.value))


@pytest.mark.parametrize("kind", AT_THE_START)
def test_a_kind_that_does_not_ask_for_the_cache_is_seen_before_anything_is_sampled(tmp_path, kind):
    sampler = Sampler(small_model(tmp_path, kind), max_model_len=256)
    with pytest.raises(
        UserError, match=r"token by token it says something else than of the whole \(\d\.\d\d nats apart"
    ):
        sampler.start()
    sampler.stop()


def test_trying_a_model_is_counted_nowhere(tmp_path):
    with Sampler(small_model(tmp_path, "llama"), max_model_len=256) as sampler:
        counted = {name: value for name, value in sampler.stats().items() if name != "cache_tokens"}
        assert not any(counted.values()) and sampler.score_again() == []


@pytest.mark.parametrize("names", [["q_proj", "gate_proj", "up_proj", "down_proj"], ["gate_proj"]])
def test_names_that_peft_takes_for_stacked_experts_are_refused(tmp_path, names):
    base = AutoModelForCausalLM.from_pretrained(small_model(tmp_path, "glm4_moe"))
    with pytest.raises(UserError, match="peft adapts this model's stacked experts in place of layers of these names"):
        LoraPolicy(base, LoraSettings(rank=2, target_modules=names), device=torch.device("cpu"), seed=0)
