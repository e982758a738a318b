"""`[trainer]`: how the weights change. Names, defaults and meaning are Prime-RL's (`prime_rl/configs/trainer.py`).

The tables that the learner reads are the learner's own classes: one definition, no copies.
"""

from harbortrainer.config.base import Table
from harbortrainer.engines.local.learner.settings import (
    ConstantScheduler,
    LoraSettings,
    LossSettings,
    OptimSettings,
    SchedulerSettings,
)


class TrainedModelConfig(Table):
    """`[trainer.model]`: what is trained of the model."""

    lora: LoraSettings | None = None
    """The adapter; the embedded engine trains nothing without one."""


class TrainerConfig(Table):
    """`[trainer]`."""

    model: TrainedModelConfig = TrainedModelConfig()
    """What is trained of the model."""

    loss: LossSettings = LossSettings()
    """The loss."""

    optim: OptimSettings = OptimSettings()
    """The optimizer."""

    scheduler: SchedulerSettings = ConstantScheduler()
    """The learning rate's course over the run."""
