"""The learning rate of each step, in closed form.

Equal to what Prime-RL's trainer builds from torch's schedulers (src/prime_rl/trainer/scheduler.py at commit
559b44772): step 0 is the first optimizer step, and a min_lr of 0 starts and ends at 1e-8 of the peak in the
linear parts. A closed form has no state, so that a resumed run needs nothing but its step.
"""

import math

from harbortrainer.engines.local.learner.settings import (
    ConstantScheduler,
    CosineScheduler,
    LinearScheduler,
)

TINY = 1e-8


def learning_rate(
    step: int,
    scheduler: ConstantScheduler | LinearScheduler | CosineScheduler,
    *,
    peak: float,
    max_steps: int | None,
) -> float:
    """The rate of the optimizer step number `step` (from 0).

    Raises:
        ValueError: The scheduler needs max_steps, or its phases do not fit into it.
    """
    if isinstance(scheduler, ConstantScheduler) or peak == 0:
        return peak
    _refuse_what_does_not_fit(scheduler, max_steps)
    low = scheduler.min_lr / peak if scheduler.min_lr > 0 else TINY
    if step < scheduler.warmup_steps:
        return peak * (low + (1 - low) * step / scheduler.warmup_steps)
    if isinstance(scheduler, LinearScheduler):
        return peak * _linear_decay(step, scheduler, low, max_steps)
    assert max_steps is not None
    done = (step - scheduler.warmup_steps) / (max_steps - scheduler.warmup_steps)
    return scheduler.min_lr + (peak - scheduler.min_lr) * (1 + math.cos(math.pi * min(done, 1.0))) / 2


def _linear_decay(step: int, scheduler: LinearScheduler, low: float, max_steps: int | None) -> float:
    if scheduler.decay_steps == 0 or max_steps is None:
        return 1.0
    since = step - (max_steps - scheduler.decay_steps)
    if since <= 0:
        return 1.0
    return 1 + (low - 1) * min(since / max(1, scheduler.decay_steps - 1), 1.0)


def _refuse_what_does_not_fit(scheduler: LinearScheduler | CosineScheduler, max_steps: int | None) -> None:
    decay = scheduler.decay_steps if isinstance(scheduler, LinearScheduler) else 1
    if isinstance(scheduler, LinearScheduler) and scheduler.warmup_steps == 0 and decay == 0:
        raise ValueError("a linear scheduler needs warmup_steps or decay_steps; use type constant instead")
    if decay == 0:
        return
    if max_steps is None:
        raise ValueError(f"the {scheduler.type} scheduler needs max_steps")
    if scheduler.warmup_steps + decay > max_steps:
        raise ValueError(f"the {scheduler.type} scheduler's steps do not fit into max_steps = {max_steps}")
