"""The learner on a tiny model: it learns, it honours its keys, and it is the policy that it says it is."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from plain_sampler import PlainSampler
from tiny_model import build_tiny_model

from harbortrainer.config.trainer_table import (
    LinearScheduler,
    LoraSettings,
    LossSettings,
    OptimSettings,
)
from harbortrainer.engines.local.learner.learner import Learner
from harbortrainer.engines.local.learner.lora_policy import adapted_layers
from harbortrainer.engines.local.learner.training_sample import Sample, SampleError
from harbortrainer.engines.local.rollouts.group import group_advantages
from harbortrainer.errors import UserError

PROMPT = [5, 6, 7, 8]
LORA = LoraSettings(rank=4, alpha=8)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return build_tiny_model(tmp_path_factory.mktemp("tiny"), hidden=32, layers=2)


def make(model, **changes) -> Learner:
    optim = changes.pop("optim", OptimSettings(lr=1e-2))
    lora = changes.pop("lora", LORA)
    loss = changes.pop("loss", LossSettings())
    return Learner(model, lora, optim, loss, **changes)


def sampler_of(model, learner: Learner) -> PlainSampler:
    sampler = PlainSampler(model, learner.adapter_config)
    sampler.load(learner.weights(), learner.version)
    return sampler


def scored(samples: list[Sample], reward) -> list[Sample]:
    advantages = group_advantages([reward(s) for s in samples])
    return [replace(s, advantage=a) for s, a in zip(samples, advantages, strict=True)]


def even(sample: Sample) -> float:
    answer = sample.token_ids[len(PROMPT) :]
    return sum(t % 2 == 0 for t in answer) / len(answer)


def batch(model, learner: Learner, count=8, length=6, **kwargs) -> list[Sample]:
    return scored(sampler_of(model, learner).answers(PROMPT, count, length, **kwargs), even)


def test_the_reward_goes_up(model):
    learner = make(model, optim=OptimSettings(lr=3e-2))
    sampler = sampler_of(model, learner)
    rewards = []
    for _ in range(30):
        sampler.load(learner.weights(), learner.version)
        answers = sampler.answers(PROMPT, 32, 4)
        rewards.append(sum(map(even, answers)) / len(answers))
        metrics = learner.train(scored(answers, even))
        assert metrics["proof/logprob_diff/max"] < 1e-4
    assert learner.version == 30
    assert sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3 + 0.3


def test_version_0_is_the_base_model(model):
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


def test_stale_samples_train_through_the_trust_region_and_the_proof_holds(model):
    learner = make(model, optim=OptimSettings(lr=0.1), loss=LossSettings(dppo_mask_low=0.01, dppo_mask_high=0.01))
    stale = batch(model, learner, count=16)
    learner.train(stale)
    metrics = learner.train(stale)
    assert metrics["staleness/mean"] == 1
    assert metrics["mismatch_kl/all/max"] > 1e-3
    assert metrics["is_masked/mean"] > 0
    assert metrics["proof/logprob_diff/max"] < 1e-4


def test_a_trial_may_span_two_versions(model):
    learner = make(model)
    first = batch(model, learner)
    learner.train(first)
    sampler = sampler_of(model, learner)
    longer = sampler.answers(list(first[0].token_ids), 4, 5)
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


def test_the_packing_does_not_change_the_step(model):
    whole, split = make(model), make(model, micro_batch_tokens=1)
    samples = batch(model, whole)
    short = [
        replace(s, **{k: getattr(s, k)[:7] for k in ("token_ids", "mask", "logprobs", "versions")}) for s in samples
    ]
    one, other = whole.train(samples + short), split.train(samples + short)
    assert one["loss"] == pytest.approx(other["loss"], abs=1e-6)
    assert one["optim/grad_norm"] == pytest.approx(other["optim/grad_norm"], rel=1e-4)
    for name, weights in whole.weights().items():
        torch.testing.assert_close(weights, split.weights()[name], atol=1e-5, rtol=1e-3)


def test_only_what_has_an_advantage_trains(model):
    learner, other = make(model), make(model)
    samples = batch(model, learner)
    metrics = learner.train(samples + [replace(s, advantage=0.0) for s in samples])
    other.train(samples)
    assert metrics["samples/pruned"] >= 8
    assert all(torch.equal(learner.weights()[n], w) for n, w in other.weights().items())


def told(samples: list[Sample]) -> list[Sample]:
    """The same, and the last two tokens of the prompt are to be predicted."""
    return [replace(s, ce_weights=[0.1 * (t in (2, 3)) for t in range(len(s))]) for s in samples]


def test_echo_learns_to_predict_what_the_model_is_told_whatever_the_reward(model):
    learner = make(model, optim=OptimSettings(lr=3e-2))
    samples = [replace(s, advantage=0.0) for s in told(batch(model, learner))]
    losses = [learner.train(samples)]
    assert losses[0]["tokens/predicted"] == 16
    assert losses[0]["tokens/trained"] == losses[0]["samples/pruned"] == 0
    assert losses[0]["loss"] == pytest.approx(0.1 * losses[0]["nll/mean"], rel=1e-5)
    assert losses[0]["proof/logprob_diff/max"] < 1e-4
    fresh = batch(model, learner)
    assert learner.train([replace(s, advantage=0.0) for s in told(fresh)])["nll/mean"] < losses[0]["nll/mean"]


def test_what_is_predicted_leaves_the_figures_of_what_was_sampled_as_they_are(model):
    samples = [s for s in batch(model, make(model)) if s.advantage != 0.0]
    plain, echo = make(model).train(samples), make(model).train(told(samples))
    for name in ("entropy/all/mean", "tokens/trained", "is_masked/mean", "proof/logprob_diff/mean", "staleness/mean"):
        assert echo[name] == pytest.approx(plain[name], rel=1e-5)
    assert echo["loss"] == pytest.approx(plain["loss"] + 0.1 * echo["nll/mean"], abs=1e-5)


def test_a_batch_with_nothing_to_learn_is_refused(model):
    learner = make(model)
    with pytest.raises(ValueError, match="nothing to train on"):
        learner.train([replace(s, advantage=0.0) for s in batch(model, learner)])


def test_long_samples_lose_their_tail_and_are_counted(model):
    learner = make(model, seq_len=len(PROMPT) + 2)
    metrics = learner.train(batch(model, make(model)))
    assert metrics["samples/truncated"] == metrics["samples/trained"]
    assert metrics["tokens/trained"] == 2 * metrics["samples/trained"]
    assert metrics["tokens/truncated"] == 4 * metrics["samples/trained"]


def test_the_last_versions_are_kept_and_old_ones_go(model):
    learner = make(model, keep_versions=2)
    samples = batch(model, learner)
    learner.train(samples)
    kept = {n: w.clone() for n, w in learner.weights(1).items()}
    learner.train(batch(model, learner))
    assert learner.versions == [1, 2]
    assert all(torch.equal(learner.weights(1)[n], w) for n, w in kept.items())
    with pytest.raises(KeyError):
        learner.weights(0)


def test_the_same_seed_gives_the_same_run(model):
    runs = []
    for _ in range(2):
        learner = make(model, seed=3)
        runs.append((learner.train(batch(model, learner))["loss"], learner.weights()))
    assert runs[0][0] == runs[1][0]
    assert all(torch.equal(a, runs[1][1][n]) for n, a in runs[0][1].items())


def test_a_step_in_a_worker_thread_is_the_same_step(model):
    alone, threaded = make(model), make(model)
    samples = batch(model, alone)
    threads = torch.get_num_threads()
    with ThreadPoolExecutor(1) as pool, torch.no_grad():
        step = pool.submit(threaded.train, samples)
        sampler_of(model, alone).answers(PROMPT, 4, 20)
        metrics = step.result()
    assert metrics["loss"] == alone.train(samples)["loss"]
    assert torch.get_num_threads() == threads
    assert all(torch.equal(threaded.weights()[n], w) for n, w in alone.weights().items())


def test_the_gradient_is_clipped_and_the_rate_follows_the_schedule(model):
    schedule = LinearScheduler(warmup_steps=2, decay_steps=0)
    learner = make(model, optim=OptimSettings(lr=1e-2, max_norm=1e-3), scheduler=schedule)
    samples = batch(model, learner)
    rates = []
    for _ in range(3):
        metrics = learner.train(samples)
        rates.append(metrics["optim/lr"])
    assert rates == pytest.approx([0.0, 0.005, 0.01], abs=1e-8)
    assert metrics["optim/grad_norm"] > 1e-3


def test_the_fused_optimizer_takes_the_steps_of_the_plain_one_to_float32s_rounding(model):
    learner = make(model, optim=OptimSettings(lr=1e-2, weight_decay=0.1, max_norm=None))
    fused = learner._optimizer
    assert fused.defaults["fused"]
    own = [p for group in fused.param_groups for p in group["params"]]
    twins = [p.detach().clone() for p in own]
    plain = torch.optim.AdamW(twins, lr=1e-2, weight_decay=0.1, fused=False, foreach=False)

    def alike(*_: object) -> None:
        for twin, parameter in zip(twins, own, strict=True):
            assert parameter.grad is not None
            twin.grad = parameter.grad.clone()
        plain.step()

    fused.register_step_pre_hook(alike)
    for _ in range(10):
        learner.train(batch(model, learner))
    for twin, parameter in zip(twins, own, strict=True):
        assert torch.allclose(twin, parameter, rtol=0, atol=1e-6)
        assert parameter.abs().max() > 1e-2


def test_lora_dropout_leaves_the_proof_exact(model):
    learner = make(model, lora=LoraSettings(rank=4, alpha=8, dropout=0.5), optim=OptimSettings(lr=0.1))
    learner.train(batch(model, learner))
    metrics = learner.train(batch(model, learner))
    assert metrics["mismatch_kl/all/max"] > 1e-6
    assert metrics["proof/logprob_diff/max"] < 1e-4


def test_in_bfloat16_an_adapter_is_computed_in_it_and_stepped_in_float32(model):
    learner = make(model, dtype="bfloat16")
    samples = batch(model, make(model))
    metrics = learner.train(samples)
    assert metrics["proof/logprob_diff/max"] > 1e-4
    masters = learner._policy.masters()
    for name, weight in learner.weights().items():
        assert (weight.dtype, masters[name].dtype) == (torch.bfloat16, torch.float32)
        assert torch.equal(weight, masters[name].bfloat16())
    assert any(not torch.equal(master, master.bfloat16().float()) for master in masters.values())
    assert {parameter.dtype for parameter in learner._policy.parameters} == {torch.float32}


def test_an_error_changes_nothing(model):
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
def test_a_sample_that_breaks_the_rules_is_named(model, changes, message):
    learner = make(model)
    sample = replace(batch(model, learner)[0], **{"advantage": 1.0} | changes)
    with pytest.raises(SampleError, match=rf"task demo, trial demo__0: .*{message}"):
        learner.train([sample])


def test_patterns_and_unknown_names_choose_the_layers_as_prime_rl_does(model):
    learner = make(model, lora=LoraSettings(rank=2, target_modules=["experts", r"layers\.1\..*\.q_proj", "mlp"]))
    adapted = {name.split(".lora_")[0].removeprefix("base_model.model.") for name in learner.weights()}
    assert adapted == {
        "model.layers.1.self_attn.q_proj",
        *(f"model.layers.{i}.mlp.{n}_proj" for i in (0, 1) for n in ("gate", "up", "down")),
    }


def test_the_layers_of_an_adapter_are_known_by_name_before_a_weight_is_loaded(model, tmp_path):
    (tmp_path / "config.json").write_bytes((model / "config.json").read_bytes())
    lora = LoraSettings(rank=2, target_modules=["experts", r"layers\.1\..*\.q_proj", "mlp"])
    assert adapted_layers(str(tmp_path), lora) == ["down_proj", "gate_proj", "q_proj", "up_proj"]
    assert "lm_head" not in adapted_layers(str(tmp_path), LoraSettings())


def test_a_target_that_no_layer_has_is_one_clear_line(model):
    with pytest.raises(UserError, match=r"target_modules: .*q_proj"):
        make(model, lora=LoraSettings(target_modules=["nothing"]))


def test_a_model_that_is_not_there_is_one_clear_line(tmp_path):
    with pytest.raises(UserError, match="cannot be loaded") as error:
        make(tmp_path)
    assert "\n" not in str(error.value)
