"""`[trainer]`: model, loss, optimizer and learning-rate schedule.

Names, defaults and meaning are Prime-RL's at commit 559b44772
(`packages/prime-rl-configs/src/prime_rl/configs/trainer.py`). This module does not import torch.
"""

from typing import Annotated, Literal

from pydantic import Field

from harbortrainer.config.table import Table

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
FEED_FORWARD = ["gate_proj", "up_proj", "down_proj"]
EXPERTS = ["experts", "fc1_latent_proj", "fc2_latent_proj"]


class LoraSettings(Table):
    """`[trainer.model.lora]`."""

    rank: int = Field(16, ge=1)
    """Rank of the low-rank matrices."""

    alpha: float = Field(32.0, ge=0)
    """The update is scaled by alpha / rank."""

    dropout: float = Field(0.0, ge=0, le=1)
    """Dropout on the adapter's input during training. Costs one more forward pass per step, for the log-probability
    check."""

    target_modules: list[str] = Field([*ATTENTION, *FEED_FORWARD, *EXPERTS])
    """Linear layers to adapt. A plain name matches any part of a layer's path; a pattern is searched in it. Names
    without a match are skipped."""


class OptimSettings(Table):
    """`[trainer.optim]`, type adamw."""

    type: Literal["adamw"] = "adamw"
    """Optimizer; only AdamW is supported."""

    lr: float = Field(1e-6, ge=0)
    """Peak learning rate."""

    weight_decay: float = Field(0.01, ge=0)
    """Decoupled weight decay."""

    max_norm: float | None = Field(1.0, ge=0)
    """Maximum gradient norm; null turns clipping off."""

    betas1: float = Field(0.9, ge=0, lt=1)
    """Decay of AdamW's first moment."""

    betas2: float = Field(0.999, ge=0, lt=1)
    """Decay of AdamW's second moment."""


class ConstantScheduler(Table):
    """`[trainer.scheduler]` with type constant, the default."""

    type: Literal["constant"] = "constant"
    """Constant learning rate."""


class LinearScheduler(Table):
    """`[trainer.scheduler]` with type linear."""

    type: Literal["linear"] = "linear"
    """Linear warm-up, constant peak, linear decay over the last steps."""

    warmup_steps: int = Field(10, ge=0)
    """Number of warm-up steps from min_lr to the peak."""

    decay_steps: int = Field(10, ge=0)
    """Number of last steps in which the rate decays to min_lr; needs max_steps."""

    min_lr: float = Field(0.0, ge=0)
    """Lowest learning rate."""


class CosineScheduler(Table):
    """`[trainer.scheduler]` with type cosine."""

    type: Literal["cosine"] = "cosine"
    """Linear warm-up, then cosine decay to max_steps."""

    warmup_steps: int = Field(10, ge=0)
    """Number of warm-up steps from min_lr to the peak."""

    min_lr: float = Field(0.0, ge=0)
    """Lowest learning rate."""


SchedulerSettings = Annotated[ConstantScheduler | LinearScheduler | CosineScheduler, Field(discriminator="type")]


def check_scheduler(scheduler: SchedulerSettings, max_steps: int | None) -> None:
    """Check that the scheduler's phases fit into the run. Raises `ValueError` otherwise."""
    if isinstance(scheduler, ConstantScheduler):
        return
    decay = scheduler.decay_steps if isinstance(scheduler, LinearScheduler) else 1
    used = scheduler.warmup_steps + decay
    if used == 0:
        raise ValueError("a linear trainer.scheduler needs warmup_steps or decay_steps; use type constant instead")
    if decay and max_steps is None:
        raise ValueError(f"trainer.scheduler.type = {scheduler.type!r} needs max_steps")
    if decay and max_steps is not None and used > max_steps:
        raise ValueError(f"trainer.scheduler needs {used} steps but max_steps is {max_steps}")


class LossSettings(Table):
    """`[trainer.loss]`, type default."""

    type: Literal["default"] = "default"
    """Prime-RL's default loss: policy gradient inside a trust region, plus KL."""

    dppo_mask_low: float = Field(0.2, ge=0)
    """Masks a token with a negative advantage if its probability fell by more than this since sampling."""

    dppo_mask_high: float = Field(0.2, ge=0)
    """Masks a token with a positive advantage if its probability rose by more than this since sampling."""

    adv_tau: float = Field(1.0, ge=0)
    """Factor on the advantage; 0 leaves only the KL term."""

    kl_tau: float = Field(1e-3, ge=0)
    """Factor on the KL term, which is the squared logarithm of the importance ratio."""


class TrainedModel(Table):
    """`[trainer.model]`."""

    lora: LoraSettings | None = None
    """LoRA settings; without this table all weights are trained (full fine-tuning)."""


class TrainerConfig(Table):
    """`[trainer]`."""

    model: TrainedModel = TrainedModel()
    """Trained part of the model."""

    loss: LossSettings = LossSettings()
    """Loss function."""

    optim: OptimSettings = OptimSettings()
    """Optimizer."""

    scheduler: SchedulerSettings = ConstantScheduler()
    """Learning-rate schedule."""
