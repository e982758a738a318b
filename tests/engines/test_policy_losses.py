"""Every loss and aggregation equals a reference written from its formula: value, gradient, masked or clipped tokens.

The references compute one token in plain Python, with the derivative by log p worked out by hand.
"""

import itertools
import math
from dataclasses import replace

import loop_fakes
import pytest
import torch

from harbortrainer.config.algorithm_config import Algo
from harbortrainer.config.trainer_table import (
    CispoLoss,
    DefaultLoss,
    IcePopLoss,
    IpoLoss,
    LossSettings,
    PpoLoss,
)
from harbortrainer.engines.local.learner.loss import TrainedBatch, policy_loss, token_metrics
from harbortrainer.engines.local.learner.micro_batch import pack, truncate_samples
from harbortrainer.engines.local.learner.training_sample import Sample
from harbortrainer.engines.local.rollouts.group import Group
from harbortrainer.engines.local.rollouts.schedule import Plan

type Reference = tuple[float, float, set[str]]
"""Loss, its derivative by log p, and the flags that are set."""


def reference_default(p: float, q: float, a: float, s: DefaultLoss) -> Reference:
    r, a = p / q, s.adv_tau * a
    high, low = a > 0 and p - q > s.dppo_mask_high, a <= 0 and p - q < -s.dppo_mask_low
    gain = 0.0 if high or low else a * r
    flags = {"is_masked", "is_masked_high"} if high else {"is_masked", "is_masked_low"} if low else set()
    return s.kl_tau * math.log(r) ** 2 - gain, 2 * s.kl_tau * math.log(r) - gain, flags


def reference_ipo(p: float, q: float, a: float, s: IpoLoss) -> Reference:
    r, masked = p / q, abs(p - q) > s.eps
    gain = 0.0 if masked else s.adv_tau * a * min(r, s.max_importance_ratio)
    flags = {"is_masked"} if masked else set()
    return s.kl_tau * math.log(r) ** 2 - gain, 2 * s.kl_tau * math.log(r) - gain, flags


def reference_icepop(p: float, q: float, a: float, s: IcePopLoss) -> Reference:
    r = p / q
    if not s.ratio_low <= r <= s.ratio_high:
        return 0.0, 0.0, {"is_masked"}
    return -s.adv_tau * a * r, -s.adv_tau * a * r, set()


def reference_ppo(p: float, q: float, a: float, s: PpoLoss) -> Reference:
    r, a = p / q, s.adv_tau * a
    flags = {"ratio_capped"} if r > s.max_importance_ratio else set()
    if a > 0 and r > s.ratio_high:
        return -a * s.ratio_high, 0.0, flags | {"is_clipped"}
    if a < 0 and r < s.ratio_low:
        return -a * s.ratio_low, 0.0, flags | {"is_clipped"}
    gain = a * min(r, s.max_importance_ratio)
    return -gain, -gain, flags


def reference_cispo(p: float, q: float, a: float, s: CispoLoss) -> Reference:
    r = p / q
    weight = min(max(r, s.ratio_low), s.ratio_high)
    flags = set() if weight == r else {"is_clipped"}
    return -weight * s.adv_tau * a * math.log(p), -weight * s.adv_tau * a, flags


REFERENCES = {
    "default": reference_default,
    "ipo": reference_ipo,
    "icepop": reference_icepop,
    "ppo": reference_ppo,
    "cispo": reference_cispo,
}
SETTINGS = [
    DefaultLoss(),
    DefaultLoss(kl_tau=0.1, adv_tau=2.0, dppo_mask_low=0.3, dppo_mask_high=0.1),
    IpoLoss(),
    IpoLoss(eps=0.05, max_importance_ratio=2.0, adv_tau=0.5, kl_tau=0.1),
    IcePopLoss(),
    IcePopLoss(ratio_low=0.5, ratio_high=2.0, adv_tau=0.5),
    IcePopLoss(ratio_low=1.5, ratio_high=9.0),  # without the ratio 1 that untrained tokens get
    PpoLoss(),
    PpoLoss(ratio_low=0.5, ratio_high=1.5, max_importance_ratio=3.0, adv_tau=2.0),
    CispoLoss(),
    CispoLoss(ratio_low=0.5, ratio_high=1.5, adv_tau=0.5),
]
PROBABILITIES = [1e-6, 0.001, 0.05, 0.2, 0.3, 0.44, 0.5, 0.55, 0.7, 0.95]
TOKENS = list(itertools.product(PROBABILITIES, PROBABILITIES, [1.0, 0.3, -0.6]))


def test_defaults_match_newer_prime_rl():
    assert IpoLoss().model_dump() == {
        "type": "ipo",
        "eps": 0.3,
        "max_importance_ratio": 1e4,
        "adv_tau": 1.0,
        "kl_tau": 0.0,
    }
    assert IcePopLoss().model_dump() == {"type": "icepop", "ratio_low": 0.2, "ratio_high": 5.0, "adv_tau": 1.0}
    assert PpoLoss().model_dump() == {
        "type": "ppo",
        "ratio_low": 0.8,
        "ratio_high": 1.2,
        "max_importance_ratio": 1e4,
        "adv_tau": 1.0,
    }
    assert CispoLoss().model_dump() == {"type": "cispo", "ratio_low": 0.0, "ratio_high": 5.0, "adv_tau": 1.0}


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_loss_and_gradient_match_formula(settings: LossSettings):
    columns = torch.tensor(TOKENS, dtype=torch.float64).T
    logprobs, sampled, advantages = columns[0].log().requires_grad_(), columns[1].log(), columns[2]
    mask = torch.arange(len(TOKENS)) % 5 != 0
    weights = torch.linspace(0.1, 2.0, len(TOKENS), dtype=torch.float64)

    result = policy_loss(logprobs, sampled, advantages, mask, settings, scale=7.0, weights=weights)
    result.loss.backward()

    expected = [REFERENCES[settings.type](*token, settings) for token in TOKENS]  # ty: ignore[invalid-argument-type]
    factors = (mask * weights / 7.0).tolist()
    assert result.loss.item() == pytest.approx(sum(f * e[0] for f, e in zip(factors, expected, strict=True)))
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == pytest.approx([f * e[1] for f, e in zip(factors, expected, strict=True)])
    seen = set().union(*(flags for _, _, flags in expected))
    assert seen
    for name, flag in result.flags.items():
        wanted = [name in flags and bool(m) for (_, _, flags), m in zip(expected, mask, strict=True)]
        assert flag.tolist() == wanted, name
    assert seen <= set(result.flags)


@pytest.mark.parametrize(
    ("settings", "advantage", "loss", "gradient"),
    [
        (IpoLoss(), 1.0, -1e4, -1e4),  # inside the trust region: both probabilities are near 0
        (IcePopLoss(), 1.0, 0.0, 0.0),
        (PpoLoss(), -1.0, 1e4, 1e4),
        (PpoLoss(), 1.0, -1.2, 0.0),
        (CispoLoss(), 1.0, 50.0, -5.0),
    ],
    ids=str,
)
def test_extreme_ratio_is_bounded_and_finite(settings, advantage, loss, gradient):
    logprobs = torch.tensor([-10.0], requires_grad=True)
    sampled, mask = torch.tensor([-200.0]), torch.tensor([True])
    result = policy_loss(logprobs, sampled, torch.tensor([advantage]), mask, settings, scale=1.0)
    result.loss.backward()
    assert result.loss.item() == pytest.approx(loss)
    assert logprobs.grad is not None and logprobs.grad.item() == pytest.approx(gradient)


def group_of(rewards: list[float], lengths: list[tuple[int, ...]], algo: Algo, name: str) -> Group:
    """Return a finished group; `lengths` has the sampled tokens of each branch of each trial."""
    group = Group(id=name, plan=Plan("s", 0), size=len(rewards), algo=algo)
    group.start(0)
    for reward, branches in zip(rewards, lengths, strict=True):
        rollout = loop_fakes.rollout(reward)
        rollout.samples = [branch(length, rollout.trial) for length in branches]
        rollout.output_tokens = sum(branches)
        group.add(rollout)
    return group


def branch(length: int, trial: str) -> Sample:
    return replace(
        loop_fakes.sample(trial=trial),
        token_ids=[1] * (length + 1),
        mask=[False] + [True] * length,
        logprobs=[0.0] + [-1.0] * length,
        versions=[0] * (length + 1),
    )


GROUPS = [([1.0, 0.0, 0.5], [(2, 1), (5,), (4,)]), ([1.0, 0.0], [(7,), (1, 1)])]
"""Rewards and branches of two groups. The third trial of the first has an advantage of 0."""
MEANS = {
    # each token: 3 + 5 + 7 + 2 tokens with an advantage
    "token": lambda a, b, c, d: (sum(a) + sum(b) + sum(c) + sum(d)) / 17,
    # each trial: the mean over its tokens
    "sequence": lambda a, b, c, d: (sum(a) / 3 + sum(b) / 5 + sum(c) / 7 + sum(d) / 2) / 4,
    # each group: 12 and 9 tokens; the trial without an advantage counts in 12, and its share of the weight is lost
    "prompt": lambda a, b, c, d: ((sum(a) + sum(b)) / 12 + (sum(c) + sum(d)) / 9) / (8 / 12 + 9 / 9),
}


@pytest.mark.parametrize("aggregation", MEANS)
def test_aggregation_matches_formula(aggregation):
    algo = Algo.model_validate({"loss_aggregation": aggregation})
    groups = [group_of(*group, algo, str(index)) for index, group in enumerate(GROUPS)]
    batch = truncate_samples([sample for group in groups for sample in group.samples()], 100)
    torch.manual_seed(0)
    logprobs = {id(s): (torch.rand(sum(s.mask)) - 1.5).requires_grad_() for s in batch.samples}
    losses: dict[str, list[torch.Tensor]] = {}
    total = torch.tensor(0.0)
    for micro_batch in pack(batch.samples, 9, torch.device("cpu")):
        tokens = micro_batch.tokens
        for index in tokens.sample.unique().tolist():
            sample, own = batch.samples[index], tokens.where(tokens.sample == index)
            theirs = logprobs[id(sample)]
            total = (
                total
                + policy_loss(
                    theirs,
                    own.sampled_logprob,
                    own.advantage,
                    torch.ones(len(own), dtype=torch.bool),
                    IcePopLoss(),
                    scale=batch.weight,
                    weights=own.loss_weight,
                ).loss
            )
            losses.setdefault(sample.trial_name, []).append(-own.advantage * (theirs + 1.0).exp())
    trials = [rollout.trial for group in groups for rollout in group.rollouts if rollout.trial in losses]
    expected = MEANS[aggregation](*(torch.cat(losses[trial]) for trial in trials))
    torch.testing.assert_close(total, expected)
    leaves = list(logprobs.values())
    for ours, wanted in zip(torch.autograd.grad(total, leaves), torch.autograd.grad(expected, leaves), strict=True):
        torch.testing.assert_close(ours, wanted)


def metrics_of(settings: LossSettings) -> dict[str, float]:
    """Return the metrics of a step with two samples, of two tokens and of one."""
    samples = [replace(branch(2, "a"), advantage=1.0), replace(branch(1, "b"), advantage=-1.0)]
    (micro_batch,) = pack(samples, 9, torch.device("cpu"))
    tokens = micro_batch.tokens
    # Probabilities of 0.9, 0.1 and 0.05 after sampling at e^-1 = 0.37: ratios of 2.45, 0.27 and 0.14.
    after = {("a", 1): 0.9, ("a", 2): 0.1, ("b", 1): 0.05}
    names = [samples[index].trial_name for index in tokens.sample.tolist()]
    chosen = [after[name, position] for name, position in zip(names, tokens.position.tolist(), strict=True)]
    logprobs, mask = torch.tensor(chosen).log(), torch.ones(3, dtype=torch.bool)
    result = policy_loss(logprobs, tokens.sampled_logprob, tokens.advantage, mask, settings, scale=3.0)
    nothing = tokens.where(~mask)
    return token_metrics([TrainedBatch(tokens, logprobs, torch.ones(3), result, nothing, torch.ones(0))], 2, 0)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        # Masked: 0.9 rose by 0.53; 0.05 fell by 0.32. Means of 1/2 and 1/1 over the samples.
        (DefaultLoss(), {"is_masked": 0.75, "is_masked_high": 0.25, "is_masked_low": 0.5}),
        (IpoLoss(), {"is_masked": 0.75}),
        (IpoLoss(eps=0.5), {"is_masked": 0.25}),
        (IcePopLoss(ratio_low=0.2, ratio_high=2.0), {"is_masked": 0.75}),
        (PpoLoss(), {"is_clipped": 0.75, "ratio_capped": 0.0}),
        (PpoLoss(max_importance_ratio=2.0), {"is_clipped": 0.75, "ratio_capped": 0.25}),
        (CispoLoss(ratio_high=2.0), {"is_clipped": 0.25}),
        (CispoLoss(ratio_low=0.5, ratio_high=2.0), {"is_clipped": 1.0}),
    ],
    ids=str,
)
def test_metrics_match_hand_count(settings, expected):
    metrics = metrics_of(settings)
    shares = {name.removesuffix("/mean"): value for name, value in metrics.items() if name.startswith(("is_", "ratio"))}
    assert shares == pytest.approx(expected)
    assert ("masked_mismatch_kl/mean" in metrics) == ("is_masked" in expected)


def test_mismatch_kl_of_masked_tokens_matches_hand_count():
    def kl(p: float) -> float:
        r = p / math.exp(-1)
        return r - math.log(r) - 1

    metrics = metrics_of(IpoLoss())
    assert metrics["masked_mismatch_kl/mean"] == pytest.approx((kl(0.9) + kl(0.05)) / 2, rel=1e-5)
    assert metrics["unmasked_mismatch_kl/mean"] == pytest.approx((kl(0.1) + 0) / 2, rel=1e-5)
