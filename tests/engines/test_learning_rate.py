"""Learning-rate schedules, compared with the torch schedulers that Prime-RL's trainer chains."""

import pytest
import torch
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR

from harbortrainer.config.trainer_table import (
    ConstantScheduler,
    CosineScheduler,
    LinearScheduler,
    check_scheduler,
    schedule_note,
)
from harbortrainer.engines.local.learner.learner import learning_rate

PEAK = 0.5


def torch_rates(make_scheduler, steps: int) -> list[float]:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=PEAK)
    scheduler = make_scheduler(optimizer)
    rates = []
    for _ in range(steps):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return rates


def our_rates(scheduler, steps: int) -> list[float]:
    return [learning_rate(i, scheduler, peak=PEAK, max_steps=steps) for i in range(steps)]


def test_constant_rate():
    assert our_rates(ConstantScheduler(), 3) == [PEAK] * 3


@pytest.mark.parametrize("low", [0.0, 0.1])
def test_linear_warmup_and_decay(low):
    factor = low / PEAK if low else 1e-8

    def make(optimizer):
        up = LinearLR(optimizer, factor, 1.0, 3)
        flat = LinearLR(optimizer, 1.0, 1.0, 5)
        down = LinearLR(optimizer, 1.0, factor, 3)
        return SequentialLR(optimizer, [up, flat, down], [3, 8])

    expected = torch_rates(make, 12)
    assert our_rates(LinearScheduler(warmup_steps=3, decay_steps=4, min_lr=low), 12) == pytest.approx(expected)
    assert our_rates(LinearScheduler(warmup_steps=3, decay_steps=4, min_lr=low), 12)[-1] == pytest.approx(factor * PEAK)


def test_cosine_ends_at_last_step():
    def make(optimizer):
        up = LinearLR(optimizer, 1e-8, 1.0, 2)
        return SequentialLR(optimizer, [up, CosineAnnealingLR(optimizer, T_max=8, eta_min=0.0)], [2])

    assert our_rates(CosineScheduler(warmup_steps=2), 10) == pytest.approx(torch_rates(make, 10), abs=1e-9)


@pytest.mark.parametrize(
    ("scheduler", "max_steps"),
    [
        (LinearScheduler(warmup_steps=0, decay_steps=0), 10),
        (LinearScheduler(warmup_steps=0, decay_steps=5), None),
        (LinearScheduler(warmup_steps=10, decay_steps=5), 10),
        (CosineScheduler(warmup_steps=10), 10),
        (CosineScheduler(), None),
    ],
)
def test_refuses_schedule_that_never_decays(scheduler, max_steps):
    with pytest.raises(ValueError, match="scheduler"):
        check_scheduler(scheduler, max_steps)


@pytest.mark.parametrize("low", [0.0, 0.1])
def test_long_decay_is_one_of_the_steps_after_the_warmup(low):
    asked, fitting = (LinearScheduler(warmup_steps=1, decay_steps=steps, min_lr=low) for steps in (10, 3))
    check_scheduler(asked, 4)
    assert our_rates(asked, 4) == our_rates(fitting, 4)
    assert our_rates(asked, 4)[1] == PEAK and our_rates(asked, 4)[-1] < PEAK / 4
    assert "decays in 3 steps, not 10" in schedule_note(asked, 4) and schedule_note(fitting, 4) == ""


def test_warmup_alone_needs_no_max_steps():
    scheduler = LinearScheduler(warmup_steps=2, decay_steps=0)
    check_scheduler(scheduler, None)
    assert learning_rate(99, scheduler, peak=PEAK, max_steps=None) == PEAK
