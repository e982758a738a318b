"""Packing into micro batches does not change log-probabilities."""

import pytest
import torch
from tiny_model import build_tiny_model
from transformers import AutoModelForCausalLM, Gemma2Config, Gemma2ForCausalLM, GPT2Config, GPT2LMHeadModel

from harbortrainer.config.trainer_table import LoraSettings
from harbortrainer.engines.local.learner.micro_batch import pack, truncate_samples
from harbortrainer.engines.local.learner.policies import LoraPolicy
from harbortrainer.engines.local.learner.training_sample import Sample

CPU = torch.device("cpu")


def sample(length: int, trained: list[int], seed: int = 0, version: int = 0) -> Sample:
    ids = torch.randint(3, 300, (length,), generator=torch.Generator().manual_seed(seed)).tolist()
    mask = [t in trained for t in range(length)]
    return Sample(ids, mask, [-1.0 * m for m in mask], [version] * length, 0.5 + seed, 1.0)


SAMPLES = [sample(9, [3, 4, 8], 0), sample(20, [1, 19], 1), sample(5, [4], 2, version=1), sample(30, [10], 3)]


def whole_model_logprobs(model, samples) -> dict[tuple[int, int], float]:
    found = {}
    for i, s in enumerate(samples):
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([s.token_ids])).logits[0].float() / s.temperature
        logprobs = torch.log_softmax(logits, -1)
        found |= {(i, t): logprobs[t - 1, s.token_ids[t]].item() for t, m in enumerate(s.mask) if m}
    return found


def packed_logprobs(policy, samples, budget, training=False) -> dict[tuple[int, int], float]:
    found = {}
    for batch in pack(samples, budget, CPU, packing=policy.packing):
        logprobs, _ = policy.logprobs(batch, training=training)
        keys = zip(batch.tokens.sample.tolist(), batch.tokens.position.tolist(), strict=True)
        found |= dict(zip(keys, logprobs.tolist(), strict=True))
    return found


def qwen3(tmp_path):
    return AutoModelForCausalLM.from_pretrained(build_tiny_model(tmp_path, hidden=32, layers=1))


def gpt2(tmp_path):
    """A model with learned positions, dropout in the base, and other module names."""
    return GPT2LMHeadModel(GPT2Config(vocab_size=320, n_embd=32, n_layer=1, n_head=2, n_positions=64))


def gemma2(tmp_path):
    """A model that caps its logits after the output matrix."""
    return Gemma2ForCausalLM(
        Gemma2Config(
            vocab_size=320,
            hidden_size=32,
            intermediate_size=32,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=16,
            final_logit_softcapping=0.05,
        )
    )


@pytest.mark.parametrize(("make", "layers"), [(qwen3, "q_proj"), (gpt2, "lm_head"), (gemma2, "q_proj")])
@pytest.mark.parametrize("budget", [1, 40, 1000])
def test_packing_keeps_logprobs(tmp_path, make, layers, budget):
    model = make(tmp_path).eval()
    expected = whole_model_logprobs(model, SAMPLES)
    policy = LoraPolicy(model, LoraSettings(rank=2, target_modules=[layers]), device=CPU, seed=0)
    for training in (False, True):
        found = packed_logprobs(policy, SAMPLES, budget, training)
        assert found.keys() == expected.keys()
        assert [found[k] for k in expected] == pytest.approx(list(expected.values()), abs=1e-5)


def gradients(model, checkpointing: bool):
    lora = LoraSettings(rank=2, target_modules=["c_attn", "q_proj", "lm_head"])
    policy = LoraPolicy(model, lora, device=CPU, seed=0, checkpointing=checkpointing)
    policy.set_weights({n: torch.full_like(w, 0.01) for n, w in policy.weights().items()})
    (batch,) = pack(SAMPLES, 1000, CPU, packing=policy.packing)
    logprobs, _ = policy.logprobs(batch, training=True)
    logprobs.sum().backward()
    return [logprobs, *(p.grad for p in policy.parameters)]


@pytest.mark.parametrize("make", [qwen3, gpt2])
def test_activation_checkpointing_keeps_gradient(tmp_path, make):
    torch.manual_seed(0)
    model = make(tmp_path).eval()
    twin = type(model)(model.config)
    twin.load_state_dict(model.state_dict())
    for plain, checkpointed in zip(gradients(model, False), gradients(twin, True), strict=True):
        torch.testing.assert_close(plain, checkpointed)


def test_micro_batches_keep_max_tokens():
    batches = pack(SAMPLES, 32, CPU)
    assert all(b.input_ids.shape[1] <= 32 for b in batches)
    assert len(batches) == 2
    assert sum(b.input_ids.shape[1] for b in batches) == 8 + 19 + 4 + 10
    assert sum(len(b.tokens) for b in batches) == 7


def test_long_sample_gets_own_micro_batch():
    assert sorted(b.input_ids.shape[1] for b in pack(SAMPLES, 1, CPU)) == [4, 8, 10, 19]


def test_packs_tokens_of_one_version():
    (batch,) = pack(SAMPLES, 1000, CPU, version=1)
    assert batch.tokens.sample.tolist() == [2]
    assert batch.tokens.advantage.tolist() == [1.0]


def test_truncation_counts_lost_tokens_and_drops_empty_samples():
    batch = truncate_samples(SAMPLES, 9)
    assert [len(s) for s in batch.samples] == [9, 9, 5]
    assert (batch.truncated_samples, batch.truncated_tokens, batch.trained) == (2, 2, 5)
