"""The planned memory of full fine-tuning equals the allocated tensors; runs that do not fit are refused."""

import pytest
import torch
from sampler_setup import sample_for_training
from transformers import AutoModelForCausalLM, Qwen3Config

from harbortrainer.config.trainer_table import DefaultLoss, OptimSettings
from harbortrainer.doctor import gpus, machine_checks
from harbortrainer.doctor.finding import Level
from harbortrainer.engines import memory_count
from harbortrainer.engines.engine_choice import Gpu
from harbortrainer.engines.fake_forward import saved_tensors
from harbortrainer.engines.local.learner.learner import Learner
from harbortrainer.engines.local.learner.policies import FullPolicy
from harbortrainer.engines.local.sampler import Sampler
from harbortrainer.engines.local.weight_update import update_weights
from harbortrainer.engines.memory_count import plan_memory, saved_bytes, total_bytes

GIB = 1024**3
SMALL = Qwen3Config(
    vocab_size=151_936, hidden_size=1024, intermediate_size=3072, num_hidden_layers=28, num_attention_heads=16,
    num_key_value_heads=8, head_dim=128, max_position_embeddings=40_960, tie_word_embeddings=True,
)  # fmt: skip
"""Qwen3-0.6B's shape."""


def test_counted_memory_equals_allocated_memory(folder):
    plan = plan_memory(folder, None, device_type="cpu", capacity=20 * GIB, off_policy=1)
    with Sampler(folder, max_model_len=512) as sampler:
        learner = Learner(folder, None, OptimSettings(), DefaultLoss(), base=sampler.model, keep_versions=2)
        for turn in range(5):
            learner.train([sample_for_training(sampler, turn)])
            update_weights(learner, sampler)
        states = learner._optimizer.state.values()
        adam_moments = [value for state in states for name, value in state.items() if name != "step"]
        model = [*sampler.model.parameters(), *learner._policy.model.parameters()]
        assert total_bytes(model) == plan.weights
        largest = max(weight.nbytes for weight in learner._policy.parameters)
        assert total_bytes([*learner._policy.parameters, *adam_moments]) + 2 * largest == plan.trained
        history = learner._history
        versions = [history.base, *history._versions.values(), *history._evicted.values()]
        assert [total_bytes(version.values()) for version in versions] == [plan.version] * (plan.versions - 1)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_saved_activations_equal_the_count(folder, checkpointing):
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    FullPolicy(base, device=torch.device("cpu"), checkpointing=checkpointing)
    ids = torch.zeros(1, 333, dtype=torch.long)
    saved = saved_bytes(saved_tensors(lambda: base.get_decoder()(input_ids=ids, use_cache=False), base.parameters()))
    empty, _ = memory_count.build_without_weights(folder, None, torch.float32)
    if checkpointing:
        memory_count.recompute_activations(empty)
    assert saved == pytest.approx(333 * memory_count.count_saved(empty).per_token, rel=0.005)


def test_half_precision_model_by_hand(tmp_path):
    """Per weight: two bf16 copies; a master, a gradient and two moments in float32. Two embedding gradients."""
    SMALL.save_pretrained(tmp_path)
    plan = plan_memory(tmp_path, None, device_type="cuda", capacity=int(0.9 * 24 * GIB))
    layer = 1024 * 2 * (2048 + 1024) + 3 * 1024 * 3072 + 2 * 1024 + 2 * 128
    weights = 28 * layer + 151_936 * 1024 + 1024
    assert weights == 596_049_920
    assert plan.weights == 4 * weights
    assert plan.trained == 16 * weights + 2 * 2 * 151_936 * 1024
    assert plan.kept_versions == 0, "kept versions are in host memory"
    assert plan.version == 2 * weights
    assert plan.fits(4096, 4096)


def test_disk_must_hold_three_checkpoints(plan):
    assert machine_checks.checkpoints_gib(plan(model={"name": "org/Mine-1B"})) == 0
    assert machine_checks.checkpoints_gib(plan(model={"name": "org/Mine-1B"}, trainer={})) == 3 * 14e9 / GIB


def test_too_large_full_finetuning_proposes_lora(tmp_path):
    SMALL.save_pretrained(tmp_path)
    error = plan_memory(tmp_path, None, device_type="cuda", capacity=10 * GIB).memory_error(2048, 2048)
    assert error is not None
    assert (error.where, error.do) == ("trainer.model.lora", "add it, empty, to train a LoRA instead of every weight")
    error = plan_memory(tmp_path, None, device_type="cuda", capacity=13 * GIB).memory_error(40_960, 40_960)
    assert error is not None
    assert error.where == "seq_len"


def test_too_many_kept_versions_propose_a_smaller_number(tmp_path):
    SMALL.save_pretrained(tmp_path)
    plan = plan_memory(tmp_path, None, device_type="cuda", capacity=80 * GIB, off_policy=8)
    assert plan.host_memory_error(12 * plan.version) is None
    error = plan.host_memory_error(12 * plan.version - 1)
    assert error is not None
    assert (error.where, error.do) == ("orchestrator.max_off_policy_steps", "set it to 7 or less")
    error = plan.host_memory_error(3 * plan.version)
    assert error is not None
    assert error.where == "trainer.model.lora"


def test_doctor_checks_full_finetuning_memory(plan, tmp_path, monkeypatch):
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
