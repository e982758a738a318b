"""The learner on a tiny model: it learns, follows its settings, and reproduces the sampled log-probabilities."""

import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from plain_sampler import PlainSampler
from tiny_model import build_tiny_model

from harbortrainer.config.trainer_table import (
    CispoLoss,
    DefaultLoss,
    IcePopLoss,
    IpoLoss,
    LinearScheduler,
    LoraSettings,
    OptimSettings,
    PpoLoss,
)
from harbortrainer.engines.local.learner.learner import Learner
from harbortrainer.engines.local.learner.policies import adapted_layers
from harbortrainer.engines.local.learner.training_sample import Sample, SampleError
from harbortrainer.engines.local.rollouts.advantage import group_advantages
from harbortrainer.errors import UserError

PROMPT = [5, 6, 7, 8]
LORA = LoraSettings(rank=4, alpha=8)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return build_tiny_model(tmp_path_factory.mktemp("tiny"), hidden=32, layers=2)


def make(model, **changes) -> Learner:
    optim = changes.pop("optim", OptimSettings(lr=1e-2))
    lora = changes.pop("lora", LORA)
    loss = changes.pop("loss", DefaultLoss())
    return Learner(model, lora, optim, loss, **changes)


def sampler_of(model, learner: Learner) -> PlainSampler:
    sampler = PlainSampler(model, learner.adapter_config)
    sampler.load(learner.weights(), learner.version)
    return sampler


def with_advantages(samples: list[Sample], reward) -> list[Sample]:
    advantages = group_advantages([reward(s) for s in samples])
    return [replace(s, advantage=a) for s, a in zip(samples, advantages, strict=True)]


def share_of_even_tokens(sample: Sample) -> float:
    answer = sample.token_ids[len(PROMPT) :]
    return sum(t % 2 == 0 for t in answer) / len(answer)


def batch(model, learner: Learner, count=8, length=6, **kwargs) -> list[Sample]:
    return with_advantages(sampler_of(model, learner).sample(PROMPT, count, length, **kwargs), share_of_even_tokens)


def test_reward_increases(model):
    learner = make(model, optim=OptimSettings(lr=3e-2))
    sampler = sampler_of(model, learner)
    rewards = []
    for _ in range(30):
        sampler.load(learner.weights(), learner.version)
        answers = sampler.sample(PROMPT, 32, 4)
        rewards.append(sum(map(share_of_even_tokens, answers)) / len(answers))
        metrics = learner.train(with_advantages(answers, share_of_even_tokens))
        assert metrics["proof/logprob_diff/max"] < 1e-4
    assert learner.version == 30
    assert sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3 + 0.3


def test_version_0_is_base_model(model):
    learner = make(model)
    assert all(not a.any() for name, a in learner.weights(0).items() if "lora_B" in name)


def test_on_policy_ratios_are_1(model):
    learner = make(model)
    metrics = learner.train(batch(model, learner, temperature=0.7))
    assert metrics["mismatch_kl/all/max"] < 1e-6
    assert metrics["is_masked/mean"] == 0
    assert metrics["staleness/max"] == 0
    assert metrics["tokens/trained"] == 6 * metrics["samples/trained"]
    assert metrics["optim/lr"] == 1e-2


def test_on_policy_loss_weights_samples(model):
    """On policy every ratio is 1, so the loss is minus the weighted mean of the advantages."""
    learner = make(model, loss=IpoLoss())
    sampler = sampler_of(model, learner)
    short, long = sampler.sample(PROMPT, 1, 2), sampler.sample(PROMPT, 1, 6)
    short = [replace(s, advantage=1.0, loss_weight=1 / 2) for s in short]
    long = [replace(s, advantage=-0.5, loss_weight=1 / 6) for s in long]
    metrics = learner.train(short + long)
    assert metrics["tokens/trained"] == 8
    assert metrics["loss"] == pytest.approx(-(1.0 - 0.5) / 2, abs=1e-5)
    assert metrics["optim/grad_norm"] > 0


@pytest.mark.parametrize("loss", [IpoLoss(), IcePopLoss(), PpoLoss(), CispoLoss()], ids=lambda loss: loss.type)
def test_every_loss_trains_stale_samples(model, loss):
    learner = make(model, optim=OptimSettings(lr=0.1), loss=loss)
    stale = batch(model, learner, count=16)
    learner.train(stale)
    metrics = learner.train(stale)
    assert metrics["staleness/mean"] == 1
    assert math.isfinite(metrics["loss"]) and metrics["optim/grad_norm"] > 0
    assert ("is_masked/mean" in metrics) == (loss.type in ("ipo", "icepop"))
    assert ("is_clipped/mean" in metrics) == (loss.type in ("ppo", "cispo"))


def test_stale_samples_pass_check_and_train(model):
    learner = make(model, optim=OptimSettings(lr=0.1), loss=DefaultLoss(dppo_mask_low=0.01, dppo_mask_high=0.01))
    stale = batch(model, learner, count=16)
    learner.train(stale)
    metrics = learner.train(stale)
    assert metrics["staleness/mean"] == 1
    assert metrics["mismatch_kl/all/max"] > 1e-3
    assert metrics["is_masked/mean"] > 0
    assert metrics["proof/logprob_diff/max"] < 1e-4


def test_trial_may_span_two_versions(model):
    learner = make(model)
    first = batch(model, learner)
    learner.train(first)
    sampler = sampler_of(model, learner)
    longer = sampler.sample(list(first[0].token_ids), 4, 5)
    spliced = [
        replace(
            s,
            mask=[*first[0].mask, *s.mask[len(first[0]) :]],
            logprobs=[*first[0].logprobs, *s.logprobs[len(first[0]) :]],
            versions=[*first[0].versions, *s.versions[len(first[0]) :]],
            advantage=(-1.0) ** i,
        )
        for i, s in enumerate(longer)
    ]
    metrics = learner.train(spliced)
    assert metrics["tokens/trained"] == 4 * (6 + 5)
    assert 0 < metrics["staleness/mean"] < 1
    assert metrics["proof/logprob_diff/max"] < 1e-4


def test_packing_does_not_change_step(model):
    whole, split = make(model), make(model, micro_batch_tokens=1)
    samples = batch(model, whole)
    short = [
        replace(s, **{k: getattr(s, k)[:7] for k in ("token_ids", "mask", "logprobs", "versions")}) for s in samples
    ]
    whole_metrics, split_metrics = whole.train(samples + short), split.train(samples + short)
    assert whole_metrics["loss"] == pytest.approx(split_metrics["loss"], abs=1e-6)
    assert whole_metrics["optim/grad_norm"] == pytest.approx(split_metrics["optim/grad_norm"], rel=1e-4)
    for name, weights in whole.weights().items():
        torch.testing.assert_close(weights, split.weights()[name], atol=1e-5, rtol=1e-3)


def test_prunes_samples_without_advantage(model):
    learner, other = make(model), make(model)
    samples = batch(model, learner)
    metrics = learner.train(samples + [replace(s, advantage=0.0) for s in samples])
    other.train(samples)
    assert metrics["samples/pruned"] >= 8
    assert all(torch.equal(learner.weights()[n], w) for n, w in other.weights().items())


def with_echo(samples: list[Sample]) -> list[Sample]:
    """Return the samples with a cross-entropy weight of 0.1 on the last two tokens of the prompt."""
    return [replace(s, ce_weights=[0.1 * (t in (2, 3)) for t in range(len(s))]) for s in samples]


def test_echo_learns_to_predict_whatever_the_reward(model):
    learner = make(model, optim=OptimSettings(lr=3e-2))
    samples = [replace(s, advantage=0.0) for s in with_echo(batch(model, learner))]
    losses = [learner.train(samples)]
    assert losses[0]["tokens/predicted"] == 16
    assert losses[0]["tokens/trained"] == losses[0]["samples/pruned"] == 0
    assert losses[0]["loss"] == pytest.approx(0.1 * losses[0]["nll/mean"], rel=1e-5)
    assert losses[0]["proof/logprob_diff/max"] < 1e-4
    fresh = batch(model, learner)
    assert learner.train([replace(s, advantage=0.0) for s in with_echo(fresh)])["nll/mean"] < losses[0]["nll/mean"]


def test_predicted_tokens_do_not_change_metrics_of_sampled_tokens(model):
    samples = [s for s in batch(model, make(model)) if s.advantage != 0.0]
    plain, echo = make(model).train(samples), make(model).train(with_echo(samples))
    for name in ("entropy/all/mean", "tokens/trained", "is_masked/mean", "proof/logprob_diff/mean", "staleness/mean"):
        assert echo[name] == pytest.approx(plain[name], rel=1e-5)
    assert echo["loss"] == pytest.approx(plain["loss"] + 0.1 * echo["nll/mean"], abs=1e-5)


def test_refuses_batch_without_signal(model):
    learner = make(model)
    with pytest.raises(ValueError, match="nothing to train on"):
        learner.train([replace(s, advantage=0.0) for s in batch(model, learner)])


def test_truncates_and_counts_long_samples(model):
    learner = make(model, seq_len=len(PROMPT) + 2)
    metrics = learner.train(batch(model, make(model)))
    assert metrics["samples/truncated"] == metrics["samples/trained"]
    assert metrics["tokens/trained"] == 2 * metrics["samples/trained"]
    assert metrics["tokens/truncated"] == 4 * metrics["samples/trained"]


def test_keeps_last_versions(model):
    learner = make(model, keep_versions=2)
    samples = batch(model, learner)
    learner.train(samples)
    kept = {n: w.clone() for n, w in learner.weights(1).items()}
    learner.train(batch(model, learner))
    assert learner.versions == [1, 2]
    assert all(torch.equal(learner.weights(1)[n], w) for n, w in kept.items())
    with pytest.raises(KeyError):
        learner.weights(0)


def test_same_seed_gives_same_run(model):
    runs = []
    for _ in range(2):
        learner = make(model, seed=3)
        runs.append((learner.train(batch(model, learner))["loss"], learner.weights()))
    assert runs[0][0] == runs[1][0]
    assert all(torch.equal(a, runs[1][1][n]) for n, a in runs[0][1].items())


def test_step_in_worker_thread_is_the_same(model):
    alone, threaded = make(model), make(model)
    samples = batch(model, alone)
    threads = torch.get_num_threads()
    with ThreadPoolExecutor(1) as pool, torch.no_grad():
        step = pool.submit(threaded.train, samples)
        sampler_of(model, alone).sample(PROMPT, 4, 20)
        metrics = step.result()
    assert metrics["loss"] == alone.train(samples)["loss"]
    assert torch.get_num_threads() == threads
    assert all(torch.equal(threaded.weights()[n], w) for n, w in alone.weights().items())


def test_clips_gradient_and_follows_schedule(model):
    schedule = LinearScheduler(warmup_steps=2, decay_steps=0)
    learner = make(model, optim=OptimSettings(lr=1e-2, max_norm=1e-3), scheduler=schedule)
    samples = batch(model, learner)
    rates = []
    for _ in range(3):
        metrics = learner.train(samples)
        rates.append(metrics["optim/lr"])
    assert rates == pytest.approx([0.0, 0.005, 0.01], abs=1e-8)
    assert metrics["optim/grad_norm"] > 1e-3


def test_fused_optimizer_matches_plain_one_up_to_rounding(model):
    learner = make(model, optim=OptimSettings(lr=1e-2, weight_decay=0.1, max_norm=None))
    fused = learner._optimizer
    assert fused.defaults["fused"]
    own = [p for group in fused.param_groups for p in group["params"]]
    twins = [p.detach().clone() for p in own]
    plain = torch.optim.AdamW(twins, lr=1e-2, weight_decay=0.1, fused=False, foreach=False)

    def step_twins(*_: object) -> None:
        for twin, parameter in zip(twins, own, strict=True):
            assert parameter.grad is not None
            twin.grad = parameter.grad.clone()
        plain.step()

    fused.register_step_pre_hook(step_twins)
    for _ in range(10):
        learner.train(batch(model, learner))
    for twin, parameter in zip(twins, own, strict=True):
        assert torch.allclose(twin, parameter, rtol=0, atol=1e-6)
        assert parameter.abs().max() > 1e-2


def test_lora_dropout_does_not_affect_check(model):
    learner = make(model, lora=LoraSettings(rank=4, alpha=8, dropout=0.5), optim=OptimSettings(lr=0.1))
    learner.train(batch(model, learner))
    metrics = learner.train(batch(model, learner))
    assert metrics["mismatch_kl/all/max"] > 1e-6
    assert metrics["proof/logprob_diff/max"] < 1e-4


def test_bfloat16_adapter_has_float32_master_weights(model):
    learner = make(model, dtype="bfloat16")
    samples = batch(model, make(model))
    metrics = learner.train(samples)
    assert metrics["proof/logprob_diff/max"] > 1e-4
    masters = learner._policy.master_weights()
    for name, weight in learner.weights().items():
        assert (weight.dtype, masters[name].dtype) == (torch.bfloat16, torch.float32)
        assert torch.equal(weight, masters[name].bfloat16())
    assert any(not torch.equal(master, master.bfloat16().float()) for master in masters.values())
    assert {parameter.dtype for parameter in learner._policy.parameters} == {torch.float32}


def test_error_changes_nothing(model):
    learner = make(model)
    samples = batch(model, learner)
    before = {n: w.clone() for n, w in learner.weights().items()}
    with pytest.raises(SampleError, match="differ in length"):
        learner.train([*samples, replace(samples[0], logprobs=[0.0], advantage=1.0)])
    assert learner.version == 0
    assert all(torch.equal(learner.weights()[n], w) for n, w in before.items())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mask": [False] * 10}, "no trainable token"),
        ({"mask": [True] + [False] * 9}, "first token"),
        ({"temperature": 0.0}, "temperature"),
        ({"advantage": float("nan")}, "advantage"),
        ({"logprobs": [float("nan")] * 10}, "log-probability"),
        ({"logprobs": [0.5] * 10}, "log-probability"),
    ],
)
def test_error_names_invalid_sample(model, changes, message):
    learner = make(model)
    sample = replace(batch(model, learner)[0], **{"advantage": 1.0} | changes)
    with pytest.raises(SampleError, match=rf"task demo, trial demo__0: .*{message}"):
        learner.train([sample])


def test_target_modules_match_like_prime_rl(model):
    learner = make(model, lora=LoraSettings(rank=2, target_modules=["experts", r"layers\.1\..*\.q_proj", "mlp"]))
    adapted = {name.split(".lora_")[0].removeprefix("base_model.model.") for name in learner.weights()}
    assert adapted == {
        "model.layers.1.self_attn.q_proj",
        *(f"model.layers.{i}.mlp.{n}_proj" for i in (0, 1) for n in ("gate", "up", "down")),
    }


def test_adapted_layers_need_no_weights(model, tmp_path):
    (tmp_path / "config.json").write_bytes((model / "config.json").read_bytes())
    lora = LoraSettings(rank=2, target_modules=["experts", r"layers\.1\..*\.q_proj", "mlp"])
    assert adapted_layers(str(tmp_path), lora) == ["down_proj", "gate_proj", "q_proj", "up_proj"]
    assert "lm_head" not in adapted_layers(str(tmp_path), LoraSettings())


def test_unknown_target_module_is_one_line(model):
    with pytest.raises(UserError, match=r"target_modules: .*q_proj"):
        make(model, lora=LoraSettings(target_modules=["nothing"]))


def test_missing_model_is_one_line(tmp_path):
    with pytest.raises(UserError, match="cannot be loaded") as error:
        make(tmp_path)
    assert "\n" not in str(error.value)
