"""`[trainer]`: how the weights change. Names, defaults and meaning are Prime-RL's (`prime_rl/configs/trainer.py`)."""

from typing import Annotated, Literal

from pydantic import Field

from harbortrainer.config.base import Table

TARGET_MODULES = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


class LoraConfig(Table):
    """`[trainer.model.lora]`: the low-rank adapter that is trained; the base weights stay as they are."""

    rank: int = Field(16, ge=1)
    """Rank of the two matrices of every adapted module."""

    alpha: float = Field(32.0, ge=0)
    """Scale of the adapter; what is added to a module's output is scaled by alpha / rank."""

    target_modules: list[str] = TARGET_MODULES
    """Names of the modules that get an adapter; names the model does not have are left out silently."""


class TrainedModelConfig(Table):
    """`[trainer.model]`: what is trained of the model."""

    lora: LoraConfig | None = None
    """The adapter; the embedded engine trains nothing without one."""


class AdamWConfig(Table):
    """`[trainer.optim]`: AdamW."""

    type: Literal["adamw"] = "adamw"
    """The optimizer; the embedded engine has this one."""

    lr: float = Field(1e-6, ge=0)
    """Peak learning rate."""

    weight_decay: float = Field(0.01, ge=0)
    """Decoupled weight decay."""

    max_norm: float | None = Field(1.0, ge=0)
    """Norm the gradient is clipped to; none leaves it alone."""

    betas1: float = Field(0.9, ge=0, lt=1)
    """Decay of the first moment."""

    betas2: float = Field(0.999, ge=0, lt=1)
    """Decay of the second moment."""


class ConstantScheduler(Table):
    """The learning rate stays at its peak."""

    type: Literal["constant"] = "constant"
    """The learning rate's course."""


class LinearScheduler(Table):
    """Up in a line, flat, and down in a line at the end."""

    type: Literal["linear"] = "linear"
    """The learning rate's course."""

    warmup_steps: int = Field(10, ge=0)
    """Steps up to the peak."""

    decay_steps: int = Field(10, ge=0)
    """Steps of the last part, down to `min_lr`."""

    min_lr: float = Field(0.0, ge=0)
    """Where the learning rate ends."""


class CosineScheduler(Table):
    """Up in a line, then down along a cosine."""

    type: Literal["cosine"] = "cosine"
    """The learning rate's course."""

    warmup_steps: int = Field(10, ge=0)
    """Steps up to the peak."""

    min_lr: float = Field(0.0, ge=0)
    """Where the learning rate ends."""


SchedulerConfig = Annotated[
    ConstantScheduler | LinearScheduler | CosineScheduler, Field(discriminator="type")
]


class LossConfig(Table):
    """`[trainer.loss]`: Prime-RL's default loss, a trust region on importance ratios plus a KL term."""

    type: Literal["default"] = "default"
    """The loss; the embedded engine has this one."""

    dppo_mask_low: float = Field(0.2, ge=0)
    """A token whose probability fell by more than this, with an advantage that lowers it further, is masked."""

    dppo_mask_high: float = Field(0.2, ge=0)
    """A token whose probability rose by more than this, with an advantage that raises it further, is masked."""

    adv_tau: float = Field(1.0, ge=0)
    """Weight of the advantage."""

    kl_tau: float = Field(1e-3, ge=0)
    """Weight of the KL term against the policy that sampled."""


class TrainerConfig(Table):
    """`[trainer]`."""

    model: TrainedModelConfig = TrainedModelConfig()
    """What is trained of the model."""

    loss: LossConfig = LossConfig()
    """The loss."""

    optim: AdamWConfig = AdamWConfig()
    """The optimizer."""

    scheduler: SchedulerConfig = ConstantScheduler()
    """The learning rate's course over the run."""
