"""Sampler and learner of a run follow the doctor's memory plan."""

import warnings
from dataclasses import replace

import pytest
import torch
from scripted_run import ScriptedRun

from harbortrainer.config.trainer_table import TrainedModel
from harbortrainer.engines import memory_count
from harbortrainer.engines.local.factories import load_learner, memory_plan, start_sampler
from harbortrainer.engines.memory_count import plan_memory
from harbortrainer.errors import UserError

GIB = 1024**3


def test_sampler_and_learner_follow_plan(folder, tmp_path):
    config = ScriptedRun(tmp_path).config
    context, seq_len = config.max_model_len, config.seq_len
    plan = plan_memory(folder, config.lora, device_type="cpu", capacity=GIB)
    tight = plan.weights + plan.trained + plan.learner(max(seq_len, 600)) + 3 * context * plan.cache_bytes.per_token
    plan = replace(plan, capacity=tight)
    sampler = start_sampler(str(folder), config, plan)
    try:
        learner = load_learner(str(folder), config, sampler, plan)
        tokens = sampler.stats()["cache_tokens"]
    finally:
        sampler.stop()
    assert context <= plan.cache(context, seq_len) <= tokens <= plan.cache(context, seq_len) + 2 * 16
    assert learner._micro_batch_tokens == plan.micro_batch(context, seq_len) < 2048


def test_sampler_and_learner_have_the_dtype_of_the_run_file(folder, tmp_path):
    config = ScriptedRun(tmp_path).config
    config.inference.vllm.dtype = "bfloat16"
    sampler = start_sampler(str(folder), config)
    try:
        assert sampler.model is not None and sampler.model.dtype is torch.bfloat16
        own = load_learner(str(folder), config, sampler)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(type(sampler), "model", None)  # as with vLLM: the learner loads its own weights
            alone = load_learner(str(folder), config, sampler)
    finally:
        sampler.stop()
    for learner in (own, alone):
        assert {weight.dtype for weight in learner.weights(0).values()} == {torch.bfloat16}


def test_plan_counts_the_dtype_of_the_run_file(folder, tmp_path, monkeypatch):
    config = ScriptedRun(tmp_path).config
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (0, 4 * GIB))
    sizes = []
    for dtype in ("auto", "bfloat16", "float32"):
        config.inference.vllm.dtype = dtype
        plan = memory_plan(str(folder), config)
        assert plan is not None
        sizes.append(plan.weights)
    assert sizes[0] == sizes[1] and sizes[2] == 2 * sizes[1]


def test_lora_on_cpu_has_no_plan(folder, tmp_path):
    assert torch.cuda.is_available() or memory_plan(str(folder), ScriptedRun(tmp_path).config) is None


def test_gpu_run_uses_doctors_capacity_and_is_refused_if_too_large(folder, tmp_path, monkeypatch):
    config = ScriptedRun(tmp_path).config
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (0, 4 * GIB))
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # users would see the warning
        plan = memory_plan(str(folder), config)
    assert plan is not None
    assert (plan.device_type, plan.capacity) == ("cuda", int(0.9 * 4 * GIB))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (0, 2**10))
    with pytest.raises(UserError, match=r"model\.name: GiB: model .*; use a smaller model"):
        memory_plan(str(folder), config)


def test_full_fine_tuning_on_cpu_is_refused_before_loading(folder, tmp_path, monkeypatch):
    config = ScriptedRun(tmp_path).config
    config.trainer.model = TrainedModel(lora=None)
    assert torch.cuda.is_available() or memory_plan(str(folder), config) is None
    original = memory_count.plan_memory

    def plan_with_1_mib(*args, **kwargs):
        return replace(original(*args, **kwargs), capacity=2**20)

    monkeypatch.setattr(memory_count, "plan_memory", plan_with_1_mib)
    with pytest.raises(UserError, match=r"trainer\.model\.lora: GiB: model twice"):
        memory_plan(str(folder), config)
