"""A supervised step is the cross-entropy of the whole batch, in forward passes of few tokens."""

import copy
import random
import warnings
from pathlib import Path

import pytest

pytest.importorskip("torch")

import torch
from tiny_model import build_tiny_model

from harbortrainer.warmup import supervised
from harbortrainer.warmup.encoding import Encoded
from harbortrainer.warmup.supervised import BasePolicy, SupervisedTrainer, load_policy

BUDGET = 100


def _rows() -> list[Encoded]:
    """Nine sequences of 30 to 61 tokens, some with a common prefix, with answers of different lengths."""
    rng = random.Random(0)
    prefix = [rng.randrange(300) for _ in range(20)]
    rows = []
    for i in range(9):
        prompt = [*(prefix if i % 2 else []), *(rng.randrange(300) for _ in range(25 + 2 * i))]
        answer = [rng.randrange(300) for _ in range(5 + i % 4)]
        rows.append(Encoded(prompt + answer, [False] * len(prompt) + [True] * len(answer)))
    return rows


def _reference_loss(model, rows: list[Encoded]):
    """The mean over all answers' tokens, each row computed alone by transformers."""
    losses = []
    for row in rows:
        ids = torch.tensor(row.ids)
        own = torch.tensor(row.answer)[1:]
        logits = model(ids[None]).logits[0, :-1][own]
        losses.append(torch.nn.functional.cross_entropy(logits, ids[1:][own], reduction="none"))
    return torch.cat(losses).mean()


@pytest.fixture(autouse=True)
def _small_micro_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervised, "MICRO_BATCH", {"cpu": BUDGET})


def test_gradient_of_micro_batches_is_gradient_of_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    policy, rows = load_policy(str(build_tiny_model(tmp_path / "model"))), _rows()
    reference = copy.deepcopy(policy.model)
    expected = _reference_loss(reference, rows)
    expected.backward()
    trainer = SupervisedTrainer(policy, lr=0.0)
    sizes: list[int] = []
    embeddings = trainer.model.get_input_embeddings()
    embeddings.register_forward_hook(lambda module, args, result: sizes.append(args[0].numel()))
    monkeypatch.setattr(trainer._optimizer, "zero_grad", lambda: None)  # the gradients stay for the comparison
    assert trainer.step(rows, scale=1.0) == pytest.approx(expected.item(), rel=1e-5)
    torch.nn.utils.clip_grad_norm_(reference.parameters(), 1.0)
    for own, other in zip(trainer.model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(own.grad, other.grad, rtol=1e-3, atol=1e-6)
    assert len(sizes) > 1 and max(sizes) <= BUDGET


@pytest.fixture
def bfloat16_policy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> BasePolicy:
    """A policy in the dtype that a GPU has."""
    monkeypatch.setattr(supervised, "resolve_dtype", lambda dtype, device: torch.bfloat16)
    return load_policy(str(build_tiny_model(tmp_path / "model")))


def test_bfloat16_model_keeps_exact_rotary_frequencies(bfloat16_policy: BasePolicy) -> None:
    assert {weight.dtype for weight in bfloat16_policy.model.parameters()} == {torch.bfloat16}
    frequencies = [own for name, own in bfloat16_policy.model.named_buffers() if "inv_freq" in name]
    assert frequencies and {own.dtype for own in frequencies} == {torch.float32}


def test_bfloat16_model_keeps_small_updates(bfloat16_policy: BasePolicy) -> None:
    trainer = SupervisedTrainer(bfloat16_policy, lr=1e-4)
    first, *_, last = [trainer.step(_rows(), scale=1.0) for _ in range(20)]
    assert last < first - 0.5
    assert {weight.dtype for weight in trainer.model.parameters()} == {torch.bfloat16}


def test_likelihood_is_probability_of_answers(tmp_path: Path) -> None:
    policy = load_policy(str(build_tiny_model(tmp_path / "model")))
    rows = [Encoded(row.ids, [*([False] * (len(row.ids) - 1)), True]) for row in _rows()]
    with torch.no_grad():
        expected = [_reference_loss(policy.model, [row]).neg().exp().item() for row in rows]
    assert SupervisedTrainer(policy, lr=0.0).likelihood(rows) == pytest.approx(expected, rel=1e-4)


def test_lora_warns_of_nothing(tmp_path: Path) -> None:
    policy = load_policy(str(build_tiny_model(tmp_path / "model")))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trainer = SupervisedTrainer(policy, lr=0.0, lora_rank=2)
    assert {"lora_A", "lora_B"} == {
        name.split(".")[-3] for name, w in trainer.model.named_parameters() if w.requires_grad
    }
