"""The closed forms against the schedulers of torch that Prime-RL's trainer chains."""

import pytest
import torch
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR

from harbortrainer.config.trainer_table import ConstantScheduler, CosineScheduler, LinearScheduler, require_fit
from harbortrainer.engines.local.learner.learner import learning_rate

PEAK = 0.5


def rates(make, steps: int) -> list[float]:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=PEAK)
    scheduler = make(optimizer)
    seen = []
    for _ in range(steps):
        seen.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return seen


def ours(scheduler, steps: int) -> list[float]:
    return [learning_rate(i, scheduler, peak=PEAK, max_steps=steps) for i in range(steps)]


def test_constant_stays():
    assert ours(ConstantScheduler(), 3) == [PEAK] * 3


@pytest.mark.parametrize("low", [0.0, 0.1])
def test_linear_goes_up_stays_and_comes_down(low):
    factor = low / PEAK if low else 1e-8

    def make(optimizer):
        up = LinearLR(optimizer, factor, 1.0, 3)
        flat = LinearLR(optimizer, 1.0, 1.0, 5)
        down = LinearLR(optimizer, 1.0, factor, 3)
        return SequentialLR(optimizer, [up, flat, down], [3, 8])

    expected = rates(make, 12)
    assert ours(LinearScheduler(warmup_steps=3, decay_steps=4, min_lr=low), 12) == pytest.approx(expected)
    assert ours(LinearScheduler(warmup_steps=3, decay_steps=4, min_lr=low), 12)[-1] == pytest.approx(factor * PEAK)


def test_cosine_ends_at_the_run():
    def make(optimizer):
        up = LinearLR(optimizer, 1e-8, 1.0, 2)
        return SequentialLR(optimizer, [up, CosineAnnealingLR(optimizer, T_max=8, eta_min=0.0)], [2])

    assert ours(CosineScheduler(warmup_steps=2), 10) == pytest.approx(rates(make, 10), abs=1e-9)


@pytest.mark.parametrize(
    ("scheduler", "max_steps"),
    [
        (LinearScheduler(warmup_steps=0, decay_steps=0), 10),
        (LinearScheduler(warmup_steps=0, decay_steps=5), None),
        (LinearScheduler(warmup_steps=6, decay_steps=5), 10),
        (CosineScheduler(warmup_steps=10), 10),
        (CosineScheduler(), None),
    ],
)
def test_a_schedule_that_does_not_fit_the_run_is_refused(scheduler, max_steps):
    with pytest.raises(ValueError, match="scheduler"):
        require_fit(scheduler, max_steps)


def test_warm_up_alone_needs_no_end():
    scheduler = LinearScheduler(warmup_steps=2, decay_steps=0)
    require_fit(scheduler, None)
    assert learning_rate(99, scheduler, peak=PEAK, max_steps=None) == PEAK
