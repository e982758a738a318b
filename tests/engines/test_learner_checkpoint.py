"""Checkpoints: a resumed learner takes the same steps, and peft loads its adapter."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from plain_sampler import PlainSampler
from safetensors.torch import load_file
from tiny_model import build_tiny_model
from transformers import AutoModelForCausalLM

from harbortrainer.config.trainer_table import DefaultLoss, LoraSettings, OptimSettings
from harbortrainer.engines.local.learner.learner import Learner
from harbortrainer.errors import UserError

PROMPT = [9, 10, 11]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return build_tiny_model(tmp_path_factory.mktemp("tiny"), hidden=32, layers=2)


def make(model, lora: LoraSettings | None = None, dtype: str = "float32") -> Learner:
    return Learner(model, lora or LoraSettings(rank=4), OptimSettings(lr=0.05), DefaultLoss(), seed=1, dtype=dtype)


def batch(model, learner, seed):
    sampler = PlainSampler(model, learner.adapter_config, seed)
    sampler.load(learner.weights(), learner.version)
    return [replace(s, advantage=(-1.0) ** i) for i, s in enumerate(sampler.sample(PROMPT, 6, 5))]


def test_resumed_learner_takes_same_steps(model, tmp_path):
    learner = make(model, LoraSettings(rank=4, dropout=0.1))
    for seed in range(2):
        learner.train(batch(model, learner, seed))
    learner.save(tmp_path / "step_2")
    expected = [learner.train(batch(model, learner, seed)) for seed in (2, 3)]
    resumed = make(model, LoraSettings(rank=4, dropout=0.1))
    resumed.load(tmp_path / "step_2")
    assert resumed.version == 2
    assert resumed.versions == [2]
    found = [resumed.train(batch(model, resumed, seed)) for seed in (2, 3)]
    # The log-probability check compares with earlier versions, which a resume does not have.
    timing = ("time/", "perf/", "proof/")
    assert [{k: v for k, v in m.items() if not k.startswith(timing)} for m in found] == [
        {k: v for k, v in m.items() if not k.startswith(timing)} for m in expected
    ]
    assert all(torch.equal(resumed.weights()[n], w) for n, w in learner.weights().items())


@pytest.mark.parametrize(("saved", "resumed_in"), [("float32", "bfloat16"), ("bfloat16", "float32"), ("bfloat16",) * 2])
def test_resume_in_other_dtype_keeps_float32_weights(model, tmp_path, saved, resumed_in):
    """A run may move between a CPU (float32) and a GPU (bfloat16)."""
    learner, resumed = make(model, dtype=saved), make(model, dtype=resumed_in)
    learner.train(batch(model, make(model), 0))
    learner.save(tmp_path / "step_1")
    resumed.load(tmp_path / "step_1")
    for ours, theirs in zip(resumed._policy.parameters, learner._policy.parameters, strict=True):
        assert ours.dtype == torch.float32
        assert torch.equal(ours, theirs)
    rounded = [weight.to(getattr(torch, resumed_in)) for weight in learner._policy.parameters]
    assert all(map(torch.equal, resumed.weights().values(), rounded))


def test_peft_loads_the_adapter(model, tmp_path):
    learner = make(model)
    learner.train(batch(model, learner, 0))
    learner.save(tmp_path / "a")
    assert load_file(tmp_path / "a" / "adapter_model.safetensors").keys() == learner.weights().keys()
    loaded = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model), str(tmp_path / "a")).eval()
    sampler = PlainSampler(model, learner.adapter_config)
    sampler.load(learner.weights(), 1)
    ids = torch.tensor([PROMPT])
    with torch.no_grad():
        torch.testing.assert_close(loaded(input_ids=ids).logits, sampler.model(input_ids=ids).logits)


def test_switching_to_old_version_and_back_is_exact(model):
    learner = make(model)
    first = batch(model, learner, 0)
    learner.train(first)
    other = make(model)
    other.train(first)
    learner._policy.set_weights(learner.weights(0))
    learner._policy.set_weights(learner.weights(1))
    second = batch(model, other, 1)
    assert learner.train(second)["loss"] == other.train(second)["loss"]


def test_second_save_replaces_first(model, tmp_path):
    learner = make(model)
    learner.save(tmp_path / "a")
    learner.train(batch(model, learner, 0))
    learner.save(tmp_path / "a")
    resumed = make(model)
    resumed.load(tmp_path / "a")
    assert resumed.version == 1
    assert [p.name for p in tmp_path.iterdir()] == ["a"]


def truncate(folder: Path) -> None:
    path = folder / "learner.pt"
    path.write_bytes(path.read_bytes()[:100])


def delete_state(folder: Path) -> None:
    (folder / "learner.pt").unlink()


def truncate_weights(folder: Path) -> None:
    path = folder / "adapter_model.safetensors"
    path.write_bytes(path.read_bytes()[:100])


@pytest.mark.parametrize(
    ("damage", "message"),
    [(truncate, "damaged"), (truncate_weights, "damaged"), (delete_state, "not a checkpoint")],
)
def test_damaged_checkpoint_is_one_line_and_changes_nothing(model, tmp_path, damage, message):
    learner = make(model)
    learner.save(tmp_path / "a")
    damage(tmp_path / "a")
    learner.train(batch(model, learner, 0))
    with pytest.raises(UserError, match=message) as error:
        learner.load(tmp_path / "a")
    assert "\n" not in str(error.value)
    assert learner.version == 1


def test_refuses_checkpoint_of_other_keys(model, tmp_path):
    make(model).save(tmp_path / "a")
    for lora in (LoraSettings(rank=8), LoraSettings(rank=4, target_modules=["q_proj"])):
        with pytest.raises(UserError, match="another model or other"):
            make(model, lora).load(tmp_path / "a")
