"""A run's sampler and learner take of the memory what the doctor's plan says."""

import warnings
from dataclasses import replace

import pytest
import torch
from small_world import SmallRun
from tiny_model import build_tiny_model

from harbortrainer.config.trainer_table import TrainedModel
from harbortrainer.engines import memory_count
from harbortrainer.engines.local.parts import load_learner, planned_memory, start_sampler
from harbortrainer.engines.memory_count import plan_memory
from harbortrainer.errors import UserError

GIB = 1024**3


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return build_tiny_model(tmp_path_factory.mktemp("model"))


def test_sampler_and_learner_take_what_is_planned(folder, tmp_path):
    config = SmallRun(tmp_path).config
    context, seq_len = config.max_model_len, config.seq_len
    plan = plan_memory(folder, config.lora, kind="cpu", room=GIB)
    tight = plan.weights + plan.trained + plan.learner(max(seq_len, 600)) + 3 * context * plan.cached_token
    plan = replace(plan, room=tight)
    sampler = start_sampler(str(folder), config, plan)
    try:
        learner = load_learner(str(folder), config, sampler, plan)
        tokens = sampler.stats()["cache_tokens"]
    finally:
        sampler.stop()
    assert context <= plan.cache(context, seq_len) <= tokens <= plan.cache(context, seq_len) + 2 * 16
    assert learner._budget == plan.micro_batch(context, seq_len) < 2048


def test_a_cpu_is_not_planned_for(folder, tmp_path):
    assert torch.cuda.is_available() or planned_memory(str(folder), SmallRun(tmp_path).config) is None


def test_a_gpu_is_planned_for_by_the_doctors_room_and_a_run_without_room_is_refused(folder, tmp_path, monkeypatch):
    config = SmallRun(tmp_path).config
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (0, 4 * GIB))
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # a run would show it
        plan = planned_memory(str(folder), config)
    assert plan is not None
    assert (plan.kind, plan.room) == ("cuda", int(0.9 * 4 * GIB))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (0, 2**10))
    with pytest.raises(UserError, match=r"model\.name: GiB: model .*; use a smaller model"):
        planned_memory(str(folder), config)


def test_every_weight_on_a_cpu_without_room_is_refused_before_anything_loads(folder, tmp_path, monkeypatch):
    config = SmallRun(tmp_path).config
    config.trainer.model = TrainedModel(lora=None)
    assert torch.cuda.is_available() or planned_memory(str(folder), config) is None
    plain = memory_count.plan_memory

    def tight(*args, **kwargs):
        return replace(plain(*args, **kwargs), room=2**20)

    monkeypatch.setattr(memory_count, "plan_memory", tight)
    with pytest.raises(UserError, match=r"trainer\.model\.lora: GiB: model twice"):
        planned_memory(str(folder), config)
