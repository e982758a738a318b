"""Full fine-tuning: the updates match plain AdamW, and a resumed learner takes the same steps."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from plain_sampler import PlainSampler
from tiny_model import build_tiny_model, build_untied_model
from transformers import AutoModelForCausalLM, PreTrainedModel

from harbortrainer.config.trainer_table import DefaultLoss, LoraSettings, OptimSettings
from harbortrainer.engines.local.learner import learner_state
from harbortrainer.engines.local.learner.learner import Learner
from harbortrainer.engines.local.learner.micro_batch import pack
from harbortrainer.engines.local.learner.policies import FullPolicy
from harbortrainer.engines.local.learner.training_sample import Sample
from harbortrainer.engines.models import load_tokenizer
from harbortrainer.errors import UserError

CPU = torch.device("cpu")
OPTIM = OptimSettings(lr=1e-3, weight_decay=0.1, max_norm=0.5)
LOSS = DefaultLoss(kl_tau=0.1)


@pytest.fixture(scope="module", params=[build_tiny_model, build_untied_model], ids=["tied", "untied"])
def model(request, tmp_path_factory) -> Path:
    return request.param(tmp_path_factory.mktemp("tiny"), hidden=32, layers=2)


def make(model: Path, **changes) -> Learner:
    return Learner(model, None, changes.pop("optim", OPTIM), LOSS, **changes)


def batch(model: Path, learner: Learner, seed: int) -> list[Sample]:
    """Return samples of the learner's version for two prompts; some have a common prefix."""
    sampler = PlainSampler(model, None, seed)
    sampler.load(learner.weights(), learner.version)
    answers = sampler.sample([9, 10, 11], 3, 5) + sampler.sample([7, 8, 9, 10, 11, 12], 3, 4)
    return [replace(sample, advantage=(-1.0) ** i * (1 + i)) for i, sample in enumerate(answers)]


def plain_step(model, optimizer: torch.optim.Optimizer, samples: list[Sample]) -> float:
    """Make one plain update with one forward pass per sample; return the gradient's norm."""
    count = sum(sum(sample.mask) for sample in samples)
    optimizer.zero_grad()
    for sample in samples:
        ids = torch.tensor([sample.token_ids])
        logprobs = model(input_ids=ids).logits[0, :-1].log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0]
        mask = torch.tensor(sample.mask[1:])
        log_ratio = (logprobs - torch.tensor(sample.logprobs[1:]))[mask]
        (LOSS.kl_tau * log_ratio.square() - sample.advantage * log_ratio.exp()).sum().div(count).backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), OPTIM.max_norm or 0.0)
    optimizer.step()
    return norm.item()


@pytest.mark.parametrize("budget", [None, 1], ids=["packed and shared", "one sample per micro batch"])
def test_updates_match_plain_adamw(model, budget):
    learner = make(model, micro_batch_tokens=budget)
    plain = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    before = {name: weight.detach().clone() for name, weight in plain.named_parameters()}
    optimizer = torch.optim.AdamW(plain.parameters(), lr=OPTIM.lr, weight_decay=OPTIM.weight_decay)
    for seed in range(4):
        samples = batch(model, learner, seed)
        metrics = learner.train(samples)
        assert metrics["optim/grad_norm"] == pytest.approx(plain_step(plain, optimizer, samples), rel=1e-4)
        assert metrics["proof/logprob_diff/max"] < 1e-4
    weights = dict(plain.named_parameters())
    assert learner.weights().keys() == weights.keys()
    for name, ours in learner.weights().items():
        moved = (weights[name] - before[name]).norm()
        assert moved > 0, name
        # Single weights may differ: AdamW turns a gradient of rounding errors into a full step.
        assert (ours - weights[name]).norm() < 5e-3 * moved, name


def test_tied_matrix_is_trained_once_and_stays_tied(model):
    learner = make(model)
    learner.train(batch(model, learner, 0))
    trained = learner._policy.model
    assert isinstance(trained, PreTrainedModel)
    tied = trained.get_output_embeddings().weight is trained.get_input_embeddings().weight
    assert tied == ("lm_head.weight" not in learner.weights())
    sizes = [parameter.numel() for parameter in learner._policy.parameters]
    assert sum(sizes) == sum(weight.numel() for weight in trained.parameters())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_resumed_learner_takes_same_steps(model, tmp_path, dtype):
    learner = make(model, dtype=dtype)
    samples = [batch(model, learner, seed) for seed in range(2)]
    for given in samples:
        learner.train(given)
    learner.save(tmp_path / "step_2")
    later = [replace(sample, versions=[2] * len(sample)) for sample in batch(model, learner, 2)]
    expected = learner.train(later)
    resumed = make(model, dtype=dtype)
    resumed.load(tmp_path / "step_2")
    assert (resumed.version, resumed.versions) == (2, [2])
    found = resumed.train(later)
    timing = ("time/", "perf/", "proof/")
    assert [(k, v) for k, v in found.items() if not k.startswith(timing)] == [
        (k, v) for k, v in expected.items() if not k.startswith(timing)
    ]
    assert all(torch.equal(resumed.weights()[name], weight) for name, weight in learner.weights().items())
    ours, theirs = resumed._policy.master_weights(), learner._policy.master_weights()
    assert all(torch.equal(ours[name], master) for name, master in theirs.items())
    assert bool(theirs) == (dtype == "bfloat16")


def test_transformers_loads_the_checkpoint(model, tmp_path):
    learner = make(model)
    learner.train(batch(model, learner, 0))
    learner.save(tmp_path / "step_1")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "step_1").eval()
    own = dict(loaded.named_parameters())
    assert own.keys() == learner.weights().keys()
    assert all(torch.equal(own[name], weight) for name, weight in learner.weights().items())
    text = "the quick brown fox"
    original, saved = (load_tokenizer(folder, where="here") for folder in (model, tmp_path / "step_1"))
    assert original(text).input_ids == saved(text).input_ids
    assert original.chat_template == saved.chat_template


def truncate_weights(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:1000])


def delete_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


@pytest.mark.parametrize("damage", [truncate_weights, delete_weights])
def test_damaged_checkpoint_is_one_line_and_changes_nothing(model, tmp_path, damage):
    learner = make(model)
    learner.save(tmp_path / "a")
    damage(tmp_path / "a")
    before = learner.weights()
    with pytest.raises(UserError) as caught:
        learner.load(tmp_path / "a")
    assert "\n" not in str(caught.value)
    assert all(torch.equal(learner._policy.weights()[name], weight) for name, weight in before.items())


def test_refuses_checkpoint_of_lora_and_vice_versa(model, tmp_path):
    lora = Learner(model, LoraSettings(rank=4), OPTIM, LOSS)
    lora.save(tmp_path / "lora")
    make(model).save(tmp_path / "full")
    for learner, folder in ((make(model), "lora"), (lora, "full")):
        with pytest.raises(UserError, match=r"another model or other \[trainer.model.lora\] keys"):
            learner.load(tmp_path / folder)


def test_full_disk_raises_os_error(model, tmp_path, monkeypatch):
    learner = make(model, dtype="bfloat16")
    learner.train(batch(model, learner, 0))
    monkeypatch.setattr(learner_state, "STATE_FILE", "/dev/full")
    with pytest.raises(OSError, match="No space left"):
        learner.save(tmp_path / "step_1")
    assert list(tmp_path.iterdir()) == []


def test_half_precision_sums_gradients_in_float32(model):
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)
    policy = FullPolicy(base, device=CPU)
    samples = batch(model, make(model), 0)
    separate: list[list[torch.Tensor]] = []
    for sample in samples[:2]:
        (row,) = pack([sample], 1000, CPU)
        policy.logprobs(row, training=True)[0].sum().backward()
        separate.append([master.grad.clone() for master in policy.parameters if master.grad is not None])
        for master in policy.parameters:
            master.grad = None
    for sample in samples[:2]:
        (row,) = pack([sample], 1000, CPU)
        policy.logprobs(row, training=True)[0].sum().backward()
    assert all(weight.grad is None for weight in base.parameters())
    for master, first, second in zip(policy.parameters, *separate, strict=True):
        assert master.dtype == torch.float32
        assert master.grad is not None
        assert torch.equal(master.grad, first + second)


def test_updates_below_half_precision_add_up(model):
    """A thousand updates of a thousandth of the spacing of bfloat16."""
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)
    policy = FullPolicy(base, device=CPU)
    name = "model.norm.weight"
    before, (master,) = policy.weights()[name], [policy._masters[name]]
    assert torch.equal(before, torch.ones_like(before))
    for _ in range(1000):
        with torch.no_grad():
            master += 2**-7 / 1000
        policy.load_masters()
    assert torch.equal(policy.weights()[name], before + 2**-7)


def test_switching_to_old_version_and_back_is_exact(model):
    learner = make(model, dtype="bfloat16")
    first = learner.weights(0)
    learner.train(batch(model, learner, 0))
    masters, newest = {n: w.clone() for n, w in learner._policy.master_weights().items()}, learner.weights(1)
    learner._policy.set_weights(first)
    assert all(torch.equal(weight, first[name]) for name, weight in learner._policy.weights().items())
    learner._policy.set_weights(newest)
    assert all(torch.equal(weight, newest[name]) for name, weight in learner._policy.weights().items())
    assert all(torch.equal(master, masters[name]) for name, master in learner._policy.master_weights().items())


def test_activation_checkpointing_keeps_gradients(model):
    found = []
    for checkpointing in (False, True):
        base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        policy = FullPolicy(base, device=CPU, checkpointing=checkpointing)
        for row in pack(batch(model, make(model), 0), 1000, CPU, packing=policy.packing):
            policy.logprobs(row, training=True)[0].sum().backward()
        found.append([parameter.grad for parameter in policy.parameters])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_stale_samples_are_checked_under_their_version(model):
    learner = make(model, keep_versions=2)
    old = batch(model, learner, 0)
    learner.train(old)
    metrics = learner.train(old)
    assert metrics["staleness/mean"] == 1
    assert metrics["proof/logprob_diff/max"] < 1e-4
    assert learner.versions == [1, 2]
