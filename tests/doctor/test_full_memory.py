"""What training every weight takes, against tensors that are really there, and what is refused before it loads."""

import pytest
import torch
from sampler_setup import sampled_sample
from tiny_model import build_tiny_model
from transformers import AutoModelForCausalLM, Qwen3Config

from harbortrainer.config.trainer_table import LossSettings, OptimSettings
from harbortrainer.doctor import folders, gpus
from harbortrainer.doctor.finding import Level
from harbortrainer.engines import memory_count
from harbortrainer.engines.engine_choice import Gpu
from harbortrainer.engines.local.learner.full_policy import FullPolicy
from harbortrainer.engines.local.learner.learner import Learner
from harbortrainer.engines.local.parts import hand_over
from harbortrainer.engines.local.sampler import Sampler
from harbortrainer.engines.memory_count import bytes_of, kept_by, plan_memory

GIB = 1024**3
SMALL = Qwen3Config(
    vocab_size=151_936, hidden_size=1024, intermediate_size=3072, num_hidden_layers=28, num_attention_heads=16,
    num_key_value_heads=8, head_dim=128, max_position_embeddings=40_960, tie_word_embeddings=True,
)  # fmt: skip
"""Qwen3-0.6B's shape."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return build_tiny_model(tmp_path_factory.mktemp("model"))


def test_what_is_counted_is_what_is_really_there(folder):
    plan = plan_memory(folder, None, kind="cpu", room=20 * GIB, off_policy=1)
    with Sampler(folder, max_model_len=512) as sampler:
        learner = Learner(folder, None, OptimSettings(), LossSettings(), base=sampler.model, keep_versions=2)
        for turn in range(5):
            learner.train([sampled_sample(sampler, turn)])
            hand_over(learner, sampler)
        states = learner._optimizer.state.values()
        moments = [value for state in states for name, value in state.items() if name != "step"]
        model = [*sampler.model.parameters(), *learner._policy.model.parameters()]
        assert bytes_of(model) == plan.weights
        largest = max(weight.nbytes for weight in learner._policy.parameters)
        assert bytes_of([*learner._policy.parameters, *moments]) + 2 * largest == plan.trained
        history = learner._history
        kept = [history.base, *history._versions.values(), *history._neighbour.values()]
        assert [bytes_of(version.values()) for version in kept] == [plan.version] * (plan.versions - 1)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_what_a_pass_keeps_is_what_was_counted_without_running_it(folder, checkpointing):
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    FullPolicy(base, device=torch.device("cpu"), checkpointing=checkpointing)
    ids = torch.zeros(1, 333, dtype=torch.long)
    kept = kept_by(lambda: base.get_decoder()(input_ids=ids, use_cache=False), base.parameters())
    empty, _ = memory_count.without_content(folder, None, torch.float32)
    if checkpointing:
        memory_count.recompute_activations(empty)
    assert kept == pytest.approx(333 * memory_count.kept_per_token(empty), rel=0.005)


def test_a_model_in_half_precision_by_hand(tmp_path):
    """Two copies of two bytes; of float32 a master, a gradient and two moments; two gradients of the embeddings."""
    SMALL.save_pretrained(tmp_path)
    plan = plan_memory(tmp_path, None, kind="cuda", room=int(0.9 * 24 * GIB))
    layer = 1024 * 2 * (2048 + 1024) + 3 * 1024 * 3072 + 2 * 1024 + 2 * 128
    weights = 28 * layer + 151_936 * 1024 + 1024
    assert weights == 596_049_920
    assert plan.weights == 4 * weights
    assert plan.trained == 16 * weights + 2 * 2 * 151_936 * 1024
    assert plan.kept == 0, "what is kept lies in the machine's memory"
    assert plan.version == 2 * weights
    assert plan.fits(4096, 4096)


def test_the_disk_must_hold_three_checkpoints(plan):
    assert folders.checkpoints_gib(plan(model={"name": "org/Mine-1B"})) == 0
    assert folders.checkpoints_gib(plan(model={"name": "org/Mine-1B"}, trainer={})) == 3 * 14e9 / GIB


def test_what_has_no_room_is_told_to_train_a_lora(tmp_path):
    SMALL.save_pretrained(tmp_path)
    none = plan_memory(tmp_path, None, kind="cuda", room=10 * GIB).refusal(2048, 2048)
    assert none is not None
    assert (none.where, none.do) == ("trainer.model.lora", "add it, empty, to train a LoRA instead of every weight")
    shorter = plan_memory(tmp_path, None, kind="cuda", room=13 * GIB).refusal(40_960, 40_960)
    assert shorter is not None
    assert shorter.where == "seq_len"


def test_versions_without_room_beside_a_gpu_are_refused_with_the_number_that_has(tmp_path):
    SMALL.save_pretrained(tmp_path)
    plan = plan_memory(tmp_path, None, kind="cuda", room=80 * GIB, off_policy=8)
    assert plan.host_refusal(12 * plan.version) is None
    refusal = plan.host_refusal(12 * plan.version - 1)
    assert refusal is not None
    assert (refusal.where, refusal.do) == ("orchestrator.max_off_policy_steps", "set it to 7 or less")
    least = plan.host_refusal(3 * plan.version)
    assert least is not None
    assert least.where == "trainer.model.lora"


def test_the_doctor_counts_and_refuses_it(plan, tmp_path, monkeypatch):
    SMALL.save_pretrained(tmp_path)
    monkeypatch.setattr(gpus, "host_room", lambda: 64 * GIB)
    full = {"model": {"name": str(tmp_path)}, "seq_len": 4096, "trainer": {}}
    (fits,) = gpus.check(plan(gpus=[Gpu("A", 24_576)], **full))
    assert fits.level is Level.GREEN
    assert "model twice 2.22" in fits.what
    (large,) = gpus.check(plan(gpus=[Gpu("A", 10_240)], **full))
    assert (large.level, large.where) == (Level.RED, "run.toml: trainer.model.lora")
    monkeypatch.setattr(gpus, "host_room", lambda: 6 * GIB)
    (kept,) = gpus.check(plan(gpus=[Gpu("A", 24_576)], **full))
    assert (kept.level, kept.where) == (Level.RED, "run.toml: orchestrator.max_off_policy_steps")
