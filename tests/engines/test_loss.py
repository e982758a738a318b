"""The loss, compared with values calculated by hand at ratios other than 1."""

import math

import pytest
import torch

from harbortrainer.config.trainer_table import DefaultLoss
from harbortrainer.engines.local.learner.loss import policy_loss
from harbortrainer.engines.local.learner.trained_policy import token_logprobs

SETTINGS = DefaultLoss(kl_tau=0.1, adv_tau=2.0)


def logprobs_of(*values: float, requires_grad: bool = False) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64).log().requires_grad_(requires_grad)


def gradient(p: torch.Tensor) -> torch.Tensor:
    assert p.grad is not None
    return p.grad


def loss_of(p, q, advantages, mask=None, settings=SETTINGS, scale=1):
    mask = torch.ones(len(p), dtype=torch.bool) if mask is None else torch.tensor(mask)
    advantages = torch.tensor(advantages, dtype=torch.float64)
    return policy_loss(p, q, advantages, mask, settings, scale=scale)


def test_defaults_match_prime_rl():
    assert DefaultLoss().model_dump() == {
        "type": "default",
        "dppo_mask_low": 0.2,
        "dppo_mask_high": 0.2,
        "adv_tau": 1.0,
        "kl_tau": 1e-3,
    }


def test_on_policy_loss_and_gradient():
    p = logprobs_of(0.5, 0.1, requires_grad=True)
    result = loss_of(p, p.detach(), [1.0, -0.5], scale=2)
    result.loss.backward()
    assert result.loss.item() == pytest.approx(-(2.0 * 1.0 + 2.0 * -0.5) / 2)
    assert gradient(p).tolist() == pytest.approx([-2.0 * 1.0 / 2, -2.0 * -0.5 / 2])
    assert not any(flag.any() for flag in result.flags.values())
    assert result.mismatch_kl.tolist() == [0.0, 0.0]


def test_stale_token_in_trust_region_is_weighted_by_ratio():
    p = logprobs_of(0.30, requires_grad=True)
    result = loss_of(p, logprobs_of(0.20), [1.0])
    result.loss.backward()
    ratio, log_ratio = 1.5, math.log(1.5)
    assert result.loss.item() == pytest.approx(-2.0 * ratio + 0.1 * log_ratio**2)
    assert gradient(p).item() == pytest.approx(-2.0 * ratio + 0.1 * 2 * log_ratio)
    assert result.mismatch_kl.item() == pytest.approx(ratio - log_ratio - 1)


@pytest.mark.parametrize(
    ("p", "q", "advantage", "masked"),
    [
        (0.71, 0.50, +1.0, True),  # rose by more than 0.2, and the advantage raises it further
        (0.69, 0.50, +1.0, False),
        (0.29, 0.50, +1.0, False),  # fell, and the advantage raises it
        (0.29, 0.50, -1.0, True),  # fell by more than 0.2, and the advantage lowers it further
        (0.31, 0.50, -1.0, False),
        (0.71, 0.50, -1.0, False),  # rose, and the advantage lowers it
        (0.05, 0.001, +1.0, False),  # a ratio of 50 between tiny probabilities
        (0.29, 0.50, 0.0, True),  # an advantage of 0 counts as negative, as in Prime-RL
    ],
)
def test_trust_region_masks_by_probability_change(p, q, advantage, masked):
    policy = logprobs_of(p, requires_grad=True)
    result = loss_of(policy, logprobs_of(q), [advantage])
    result.loss.backward()
    log_ratio = math.log(p / q)
    gain = 0.0 if masked else 2.0 * advantage * p / q
    assert result.flags["is_masked"].item() is masked
    assert result.loss.item() == pytest.approx(0.1 * log_ratio**2 - gain)
    assert gradient(policy).item() == pytest.approx(0.1 * 2 * log_ratio - gain)


def test_thresholds_are_separate():
    p, q = logprobs_of(0.6, 0.4), logprobs_of(0.5, 0.5)
    high = DefaultLoss(dppo_mask_high=0.05, dppo_mask_low=0.5)
    low = DefaultLoss(dppo_mask_high=0.5, dppo_mask_low=0.05)
    for settings, masked in ((high, [True, False]), (low, [False, True])):
        flags = loss_of(p, q, [1.0, -1.0], settings=settings).flags
        assert flags["is_masked"].tolist() == masked
        assert [flags["is_masked_high"].tolist()[0], flags["is_masked_low"].tolist()[1]] == masked
        assert not flags["is_masked_high"][1] and not flags["is_masked_low"][0]


def test_masked_tokens_have_no_effect():
    p = logprobs_of(0.3, 0.9, requires_grad=True)
    q = torch.tensor([math.log(0.2), 0.0], dtype=torch.float64)
    result = loss_of(p, q, [1.0, 5.0], mask=[True, False], scale=1)
    result.loss.backward()
    alone = loss_of(logprobs_of(0.3), logprobs_of(0.2), [1.0])
    assert result.loss.item() == pytest.approx(alone.loss.item())
    assert gradient(p)[1].item() == 0.0
    assert not result.flags["is_masked"][1]


def test_losses_of_micro_batches_add_up():
    p, q = logprobs_of(0.3, 0.6, 0.2, 0.9), logprobs_of(0.2, 0.7, 0.25, 0.5)
    advantages = [1.0, -1.0, 0.5, 0.5]
    whole = loss_of(p, q, advantages, scale=4).loss
    halves = [loss_of(p[s], q[s], advantages[s], scale=4).loss for s in (slice(0, 2), slice(2, 4))]
    assert sum(h.item() for h in halves) == pytest.approx(whole.item())
    assert loss_of(p.view(2, 2), q.view(2, 2), [[1.0, -1.0], [0.5, 0.5]], [[True] * 2] * 2, scale=4).loss.item() == (
        pytest.approx(whole.item())
    )


def test_gradient_matches_finite_differences():
    torch.manual_seed(0)
    q = torch.randn(12, dtype=torch.float64).sigmoid().log()
    p = (q + 0.3 * torch.randn(12, dtype=torch.float64)).clamp_max(-0.01).requires_grad_()
    advantages = torch.randn(12, dtype=torch.float64)
    mask = torch.arange(12) % 3 != 0
    assert torch.autograd.gradcheck(lambda x: policy_loss(x, q, advantages, mask, SETTINGS, scale=8).loss, p)


def test_chunked_logprobs_match_log_softmax():
    torch.manual_seed(0)
    hidden = torch.randn(50, 8, requires_grad=True)
    matrix = torch.randn(8, 33)
    targets, temperature = torch.randint(33, (50,)), torch.full((50,), 0.7)
    whole = torch.log_softmax(hidden @ matrix / 0.7, -1)
    logprobs, entropy = token_logprobs(
        hidden, lambda h: h @ matrix, targets, temperature, vocab=33, chunk_elements=33 * 7
    )
    torch.testing.assert_close(logprobs, whole.gather(-1, targets[:, None]).squeeze(-1))
    torch.testing.assert_close(entropy, -(whole.exp() * whole).sum(-1).detach())
    (expected,) = torch.autograd.grad(whole.gather(-1, targets[:, None]).sum(), hidden, retain_graph=True)
    (ours,) = torch.autograd.grad(logprobs.sum(), hidden)
    torch.testing.assert_close(ours, expected)


def test_entropy_with_forbidden_token_is_finite():
    logits = torch.tensor([[0.0, 0.0, -torch.inf]])
    logprobs, entropy = token_logprobs(logits, lambda h: h, torch.tensor([1]), torch.ones(1), vocab=3)
    assert logprobs.item() == pytest.approx(math.log(0.5))
    assert entropy.item() == pytest.approx(math.log(2))
