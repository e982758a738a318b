"""Sequences in one row: no sample knows of another, and what several begin with is computed once and as exactly."""

from dataclasses import replace

import pytest
import torch
from tiny_model import build_tiny_model
from transformers import AutoModelForCausalLM, MambaConfig, MambaForCausalLM, MistralConfig, MistralForCausalLM

from harbortrainer.config.trainer_table import LoraSettings, LossSettings
from harbortrainer.engines.local.learner.lora_policy import LoraPolicy
from harbortrainer.engines.local.learner.loss import Scales, forward_backward
from harbortrainer.engines.local.learner.micro_batch import COPY, Packing, pack
from harbortrainer.engines.local.learner.training_sample import Sample
from harbortrainer.engines.packed_attention import PACKED_ATTENTION, PackedRow

CPU = torch.device("cpu")
LORA = LoraSettings(rank=2, target_modules=["q_proj", "k_proj", "v_proj", "o_proj", "down_proj"])


def tokens(length: int, seed: int) -> list[int]:
    return torch.randint(3, 300, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def sample(ids: list[int], given: int, advantage: float = 1.0) -> Sample:
    """A sample whose first `given` tokens were not sampled."""
    mask = [t >= given for t in range(len(ids))]
    return Sample(ids, mask, [-5.5 * m for m in mask], [0] * len(ids), 0.8, advantage)


def ragged() -> list[Sample]:
    """Two groups, in which some share more than the prompt, one sample of its own, and one that is there twice."""
    found = []
    for group, prompt in enumerate((24, 11)):
        begin, more = tokens(prompt, 100 + group), tokens(6, 200 + group)
        answers = [tokens(n, 10 * group + n) for n in (3, 17, 8)] + [more + tokens(n, 50 + n) for n in (2, 9)]
        found += [sample(begin + a, prompt, (-1.0) ** i) for i, a in enumerate(answers)]
    return [*found, sample(tokens(40, 7), 5), found[1]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return build_tiny_model(tmp_path_factory.mktemp("model"), hidden=32, layers=2)


def policy_of(folder, model=None, *, checkpointing=False, dtype=torch.float32, **changes) -> LoraPolicy:
    model = model or AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    lora = LORA.model_copy(update=changes)
    policy = LoraPolicy(model, lora, device=CPU, seed=0, checkpointing=checkpointing)
    chance = torch.Generator().manual_seed(3)
    policy.set_weights({n: 0.1 * torch.randn(w.shape, generator=chance) for n, w in policy.weights().items()})
    return policy


def by_the_book(folder, dtype=torch.float32) -> LoraPolicy:
    """The same policy with transformers' own attention, one sequence at a time."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    policy = policy_of(folder, model)
    policy.packing = Packing.ALONE
    model.set_attn_implementation("sdpa")
    return policy


def step(policy: LoraPolicy, samples: list[Sample], budget: int, packing: Packing) -> tuple[dict, float, list]:
    """Each token's log-probability and entropy, the loss, and the gradients."""
    scales = Scales(sum(map(sum, (s.mask for s in samples))), 1)
    found, loss = {}, 0.0
    for batch in pack(samples, budget, CPU, packing=packing):
        done = forward_backward(policy, batch, LossSettings(kl_tau=0.05), scales=scales)
        keys = zip(done.tokens.sample.tolist(), done.tokens.position.tolist(), strict=True)
        found |= dict(zip(keys, torch.stack([done.logprobs, done.entropy], 1), strict=True))
        loss += done.result.loss.item()
    return found, loss, [p.grad for p in policy.parameters]


@pytest.mark.parametrize("checkpointing", [False, True], ids=["kept", "computed again"])
@pytest.mark.parametrize("budget", [1, 60, 10_000])
@pytest.mark.parametrize("packing", [Packing.APART, Packing.SHARED])
def test_log_probabilities_loss_and_gradients_are_those_of_each_sample_alone(folder, packing, budget, checkpointing):
    policy = policy_of(folder, checkpointing=checkpointing)
    assert policy.packing is Packing.SHARED
    found, loss, gradients = step(policy, ragged(), budget, packing)
    expected, wanted, alone = step(by_the_book(folder), ragged(), 1, Packing.ALONE)
    assert found.keys() == expected.keys()
    for place, figures in expected.items():
        torch.testing.assert_close(found[place], figures, atol=2e-6, rtol=1e-6)
    assert loss == pytest.approx(wanted, rel=1e-6)
    for gradient, other in zip(gradients, alone, strict=True):
        torch.testing.assert_close(gradient, other, atol=1e-6 * other.abs().max().item(), rtol=1e-4)


@pytest.mark.parametrize("packing", [Packing.APART, Packing.SHARED])
def test_another_samples_tokens_change_nothing_to_the_last_bit(folder, packing):
    policy = policy_of(folder)
    samples = ragged()
    # Its first tokens stay, so that it keeps its place among the others.
    changed = replace(samples[1], token_ids=[*samples[1].token_ids[:26], *tokens(len(samples[1]) - 26, 999)])
    found, _, _ = step(policy, samples, 10_000, packing)
    other, _, _ = step(policy, [samples[0], changed, *samples[2:]], 10_000, packing)
    own = {place for place in found if place[0] == 1}
    assert all(torch.equal(found[place], other[place]) for place in found.keys() - own)
    assert not all(torch.equal(found[place], other[place]) for place in own)


def test_without_the_stretches_samples_would_leak(folder):
    """What the two tests above would not pass: the same row, as one sequence."""
    policy, (batch,) = policy_of(folder), pack(ragged(), 10_000, CPU, packing=Packing.APART)
    right, _ = policy.logprobs(batch, training=False)
    leaked, _ = policy.logprobs(replace(batch, stretches=[]), training=False)
    assert (right - leaked).abs().max() > 0.01


def test_half_precision_differs_by_its_rounding_alone(folder):
    found, _, _ = step(policy_of(folder, dtype=torch.bfloat16), ragged(), 10_000, Packing.SHARED)
    expected, _, _ = step(by_the_book(folder, torch.bfloat16), ragged(), 1, Packing.ALONE)
    difference = torch.stack([(found[place] - expected[place]).abs()[0] for place in expected])
    assert difference.mean() < 0.02


def test_a_common_beginning_stands_in_the_row_once():
    samples = ragged()
    lengths = [len(s) - 1 for s in samples]
    (apart,) = pack(samples, 10_000, CPU, packing=Packing.APART)
    assert apart.input_ids.shape == (1, sum(lengths))
    (shared,) = pack(samples, 10_000, CPU)
    once = 24 + 11 + 2 * (6 + 2 + 3 + 17 + 8 + 9 - 5) + 39
    assert shared.input_ids.shape == shared.position_ids.shape == (1, once)
    assert len(shared.tokens) == len(apart.tokens)


def test_a_beginning_is_not_shared_by_what_is_much_longer():
    samples = [sample(tokens(10, 1) + tokens(n, n), 10) for n in (21, 22)]
    (batch,) = pack(samples, 10_000, CPU)
    assert batch.input_ids.shape[1] == 30 + 21


def test_keys_that_are_copied_count_too():
    samples = [sample(tokens(400, 1) + tokens(2, n), 400) for n in range(8)]
    batches = pack(samples, 500, CPU)
    assert len(batches) == 4
    for batch in batches:
        copied = sum(length for stretch in batch.stretches for _, length in stretch.before)
        assert batch.input_ids.shape[1] + copied / COPY <= 500


def test_a_row_says_where_each_sequence_is():
    row = PackedRow(sharing=True)
    sequences = [[1, 2, 3, 4], [1, 2, 3, 4], [1, 2, 3, 5, 6], [1, 2, 3, 5, 7], [9]]
    for sequence in sequences:
        row.add(sequence)
    assert row.token_ids == [1, 2, 3, 4, 5, 6, 7, 9]
    assert [[row.token_ids[p] for p in places] for places in row.places] == sequences
    assert [[row.positions[p] for p in places] for places in row.places] == [list(range(len(s))) for s in sequences]
    assert [s.before for s in row.stretches(CPU)] == [(), ((0, 3),), ((0, 3), (1, 1)), ()]


def test_with_dropout_each_sample_is_whole(folder):
    assert policy_of(folder, dropout=0.1).packing is Packing.APART


def mistral(path):
    """Looks back a few tokens only."""
    config = MistralConfig(
        vocab_size=320, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, sliding_window=8,
    )  # fmt: skip
    return MistralForCausalLM(config)


def mamba(path):
    """Carries a state from token to token, which is in nobody's attention."""
    return MambaForCausalLM(MambaConfig(vocab_size=320, hidden_size=32, num_hidden_layers=1, state_size=4))


@pytest.mark.parametrize(("make", "layer"), [(mistral, "q_proj"), (mamba, "in_proj")])
def test_a_model_whose_tokens_meet_otherwise_gets_one_sequence_at_a_time(tmp_path, make, layer):
    model = make(tmp_path).eval()
    policy = LoraPolicy(model, LoraSettings(rank=2, target_modules=[layer]), device=CPU, seed=0)
    assert policy.packing is Packing.ALONE
    assert model.config._attn_implementation != PACKED_ATTENTION
    samples = ragged()[:4]
    batches = pack(samples, 10_000, CPU, packing=policy.packing)
    assert len(batches) == len(samples)
    for batch in batches:
        logprobs, _ = policy.logprobs(batch, training=True)
        whole = model(input_ids=batch.input_ids, use_cache=False).logits[0] / 0.8
        expected = whole.log_softmax(-1)[batch.column, batch.tokens.token]
        torch.testing.assert_close(logprobs, expected, atol=1e-5, rtol=1e-5)
