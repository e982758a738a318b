"""Packed sequences: samples do not affect each other, and shared prefixes are computed once and exactly."""

from dataclasses import replace

import pytest
import torch
from tiny_model import build_tiny_model
from transformers import AutoModelForCausalLM, MambaConfig, MambaForCausalLM, MistralConfig, MistralForCausalLM

from harbortrainer.config.trainer_table import DefaultLoss, LoraSettings
from harbortrainer.engines.attention.packed import PACKED_ATTENTION, PackedRow
from harbortrainer.engines.local.learner.loss import Scales, forward_backward
from harbortrainer.engines.local.learner.micro_batch import COPIED_PER_COMPUTED, Packing, pack
from harbortrainer.engines.local.learner.policies import LoraPolicy
from harbortrainer.engines.local.learner.training_sample import Sample

CPU = torch.device("cpu")
LORA = LoraSettings(rank=2, target_modules=["q_proj", "k_proj", "v_proj", "o_proj", "down_proj"])


def tokens(length: int, seed: int) -> list[int]:
    return torch.randint(3, 300, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def sample(ids: list[int], prompt_len: int, advantage: float = 1.0) -> Sample:
    """Return a sample whose first `prompt_len` tokens are the prompt."""
    mask = [t >= prompt_len for t in range(len(ids))]
    return Sample(ids, mask, [-5.5 * m for m in mask], [0] * len(ids), 0.8, advantage)


def mixed_samples() -> list[Sample]:
    """Return two groups with prefixes longer than the prompt, a single sample, and a duplicate."""
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
    generator = torch.Generator().manual_seed(3)
    policy.set_weights({n: 0.1 * torch.randn(w.shape, generator=generator) for n, w in policy.weights().items()})
    return policy


def reference_policy(folder, dtype=torch.float32) -> LoraPolicy:
    """Return the same policy with transformers' attention and one sequence per row."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    policy = policy_of(folder, model)
    policy.packing = Packing.ALONE
    model.set_attn_implementation("sdpa")
    return policy


def step(policy: LoraPolicy, samples: list[Sample], budget: int, packing: Packing) -> tuple[dict, float, list]:
    """Return each token's log-probability and entropy, the loss, and the gradients."""
    scales = Scales(sum(map(sum, (s.mask for s in samples))), 1)
    found, loss = {}, 0.0
    for batch in pack(samples, budget, CPU, packing=packing):
        done = forward_backward(policy, batch, DefaultLoss(kl_tau=0.05), scales=scales)
        keys = zip(done.tokens.sample.tolist(), done.tokens.position.tolist(), strict=True)
        found |= dict(zip(keys, torch.stack([done.logprobs, done.entropy], 1), strict=True))
        loss += done.result.loss.item()
    return found, loss, [p.grad for p in policy.parameters]


@pytest.mark.parametrize("checkpointing", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("budget", [1, 60, 10_000])
@pytest.mark.parametrize("packing", [Packing.APART, Packing.SHARED])
def test_packed_samples_match_separate_samples(folder, packing, budget, checkpointing):
    policy = policy_of(folder, checkpointing=checkpointing)
    assert policy.packing is Packing.SHARED
    found, loss, gradients = step(policy, mixed_samples(), budget, packing)
    expected, expected_loss, expected_gradients = step(reference_policy(folder), mixed_samples(), 1, Packing.ALONE)
    assert found.keys() == expected.keys()
    for place, values in expected.items():
        torch.testing.assert_close(found[place], values, atol=2e-6, rtol=1e-6)
    assert loss == pytest.approx(expected_loss, rel=1e-6)
    for gradient, other in zip(gradients, expected_gradients, strict=True):
        torch.testing.assert_close(gradient, other, atol=1e-6 * other.abs().max().item(), rtol=1e-4)


@pytest.mark.parametrize("packing", [Packing.APART, Packing.SHARED])
def test_samples_in_a_row_are_independent(folder, packing):
    policy = policy_of(folder)
    samples = mixed_samples()
    # The first tokens stay, so that the order of the samples does not change.
    changed = replace(samples[1], token_ids=[*samples[1].token_ids[:26], *tokens(len(samples[1]) - 26, 999)])
    found, _, _ = step(policy, samples, 10_000, packing)
    other, _, _ = step(policy, [samples[0], changed, *samples[2:]], 10_000, packing)
    own = {place for place in found if place[0] == 1}
    assert all(torch.equal(found[place], other[place]) for place in found.keys() - own)
    assert not all(torch.equal(found[place], other[place]) for place in own)


def test_without_segments_samples_would_leak(folder):
    """The two tests above can fail: without segments the row is one sequence."""
    policy, (batch,) = policy_of(folder), pack(mixed_samples(), 10_000, CPU, packing=Packing.APART)
    separate, _ = policy.logprobs(batch, training=False)
    leaked, _ = policy.logprobs(replace(batch, segments=[]), training=False)
    assert (separate - leaked).abs().max() > 0.01


def test_half_precision_differs_by_rounding_only(folder):
    found, _, _ = step(policy_of(folder, dtype=torch.bfloat16), mixed_samples(), 10_000, Packing.SHARED)
    expected, _, _ = step(reference_policy(folder, torch.bfloat16), mixed_samples(), 1, Packing.ALONE)
    difference = torch.stack([(found[place] - expected[place]).abs()[0] for place in expected])
    assert difference.mean() < 0.02


def test_common_prefix_is_in_the_row_once():
    samples = mixed_samples()
    lengths = [len(s) - 1 for s in samples]
    (apart,) = pack(samples, 10_000, CPU, packing=Packing.APART)
    assert apart.input_ids.shape == (1, sum(lengths))
    (shared,) = pack(samples, 10_000, CPU)
    once = 24 + 11 + 2 * (6 + 2 + 3 + 17 + 8 + 9 - 5) + 39
    assert shared.input_ids.shape == shared.position_ids.shape == (1, once)
    assert len(shared.tokens) == len(apart.tokens)


def test_long_tail_does_not_share_prefix():
    samples = [sample(tokens(10, 1) + tokens(n, n), 10) for n in (21, 22)]
    (batch,) = pack(samples, 10_000, CPU)
    assert batch.input_ids.shape[1] == 30 + 21


def test_copied_keys_count_toward_budget():
    samples = [sample(tokens(400, 1) + tokens(2, n), 400) for n in range(8)]
    batches = pack(samples, 500, CPU)
    assert len(batches) == 4
    for batch in batches:
        copied = sum(length for segment in batch.segments for _, length in segment.past)
        assert batch.input_ids.shape[1] + copied / COPIED_PER_COMPUTED <= 500


def test_row_maps_tokens_to_sequences():
    row = PackedRow(sharing=True)
    sequences = [[1, 2, 3, 4], [1, 2, 3, 4], [1, 2, 3, 5, 6], [1, 2, 3, 5, 7], [9]]
    for sequence in sequences:
        row.add(sequence)
    assert row.token_ids == [1, 2, 3, 4, 5, 6, 7, 9]
    assert [[row.token_ids[p] for p in places] for places in row.places] == sequences
    assert [[row.positions[p] for p in places] for places in row.places] == [list(range(len(s))) for s in sequences]
    assert [s.past for s in row.segments(CPU)] == [(), ((0, 3),), ((0, 3), (1, 1)), ()]


def test_dropout_disables_prefix_sharing(folder):
    assert policy_of(folder, dropout=0.1).packing is Packing.APART


def mistral(path):
    """A layer that sees a few previous tokens only."""
    config = MistralConfig(
        vocab_size=320, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, sliding_window=8,
    )  # fmt: skip
    return MistralForCausalLM(config)


def mamba(path):
    """A layer with a state from token to token, outside the attention."""
    return MambaForCausalLM(MambaConfig(vocab_size=320, hidden_size=32, num_hidden_layers=1, state_size=4))


@pytest.mark.parametrize(("make", "layer"), [(mistral, "q_proj"), (mamba, "in_proj")])
def test_incompatible_model_gets_one_sequence_per_row(tmp_path, make, layer):
    model = make(tmp_path).eval()
    policy = LoraPolicy(model, LoraSettings(rank=2, target_modules=[layer]), device=CPU, seed=0)
    assert policy.packing is Packing.ALONE
    assert model.config._attn_implementation != PACKED_ATTENTION
    samples = mixed_samples()[:4]
    batches = pack(samples, 10_000, CPU, packing=policy.packing)
    assert len(batches) == len(samples)
    for batch in batches:
        logprobs, _ = policy.logprobs(batch, training=True)
        whole = model(input_ids=batch.input_ids, use_cache=False).logits[0] / 0.8
        expected = whole.log_softmax(-1)[batch.column, batch.tokens.token]
        torch.testing.assert_close(logprobs, expected, atol=1e-5, rtol=1e-5)
