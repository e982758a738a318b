"""`[trainer]`: how the weights change.

Each class mirrors one table of Prime-RL's trainer config at commit 559b44772
(packages/prime-rl-configs/src/prime_rl/configs/trainer.py): its names, defaults and meaning, read without torch.
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
    """Rank of the two low-rank matrices."""

    alpha: float = Field(32.0, ge=0)
    """The update is scaled by alpha / rank."""

    dropout: float = Field(0.0, ge=0, le=1)
    """Dropout on the input of the low-rank path while training; costs one more forward a step (for the
    proof)."""

    target_modules: list[str] = Field([*ATTENTION, *FEED_FORWARD, *EXPERTS])
    """Linear layers that are adapted: a plain name matches any part of the layer's path, a pattern is
    searched in it; names that the model does not have are skipped."""


class OptimSettings(Table):
    """`[trainer.optim]`, type adamw."""

    type: Literal["adamw"] = "adamw"
    """The optimizer; only AdamW here."""

    lr: float = Field(1e-6, ge=0)
    """Peak learning rate."""

    weight_decay: float = Field(0.01, ge=0)
    """Decoupled weight decay."""

    max_norm: float | None = Field(1.0, ge=0)
    """The gradient's norm is clipped to this; None turns clipping off."""

    betas1: float = Field(0.9, ge=0, lt=1)
    """Decay of AdamW's first moment."""

    betas2: float = Field(0.999, ge=0, lt=1)
    """Decay of AdamW's second moment."""


class ConstantScheduler(Table):
    """`[trainer.scheduler]` with type constant, the default."""

    type: Literal["constant"] = "constant"
    """The learning rate stays at its peak."""


class LinearScheduler(Table):
    """`[trainer.scheduler]` with type linear: up, flat, down."""

    type: Literal["linear"] = "linear"
    """Linear warm-up, then the peak, then a linear decay over the last steps."""

    warmup_steps: int = Field(10, ge=0)
    """Steps from min_lr up to the peak."""

    decay_steps: int = Field(10, ge=0)
    """Steps at the end of the run over which the rate falls to min_lr; needs max_steps."""

    min_lr: float = Field(0.0, ge=0)
    """The lowest learning rate."""


class CosineScheduler(Table):
    """`[trainer.scheduler]` with type cosine: up, then half a cosine down to the run's end."""

    type: Literal["cosine"] = "cosine"
    """Linear warm-up, then cosine decay until max_steps."""

    warmup_steps: int = Field(10, ge=0)
    """Steps from min_lr up to the peak."""

    min_lr: float = Field(0.0, ge=0)
    """The lowest learning rate."""


SchedulerSettings = Annotated[ConstantScheduler | LinearScheduler | CosineScheduler, Field(discriminator="type")]


def require_fit(scheduler: SchedulerSettings, max_steps: int | None) -> None:
    """Raise ValueError unless the scheduler does something, and its phases fit into the run."""
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
    """A token with a negative advantage is masked when its probability fell by more than this since it was
    sampled."""

    dppo_mask_high: float = Field(0.2, ge=0)
    """A token with a positive advantage is masked when its probability rose by more than this since it was
    sampled."""

    adv_tau: float = Field(1.0, ge=0)
    """Factor on the advantage; 0 leaves only the KL term."""

    kl_tau: float = Field(1e-3, ge=0)
    """Factor on the KL term, the squared logarithm of the importance ratio."""


class TrainedModel(Table):
    """`[trainer.model]`."""

    lora: LoraSettings | None = None
    """The adapter; without one every weight is trained."""


class TrainerConfig(Table):
    """`[trainer]`."""

    model: TrainedModel = TrainedModel()
    """What is trained of the model."""

    loss: LossSettings = LossSettings()
    """The loss."""

    optim: OptimSettings = OptimSettings()
    """The optimizer."""

    scheduler: SchedulerSettings = ConstantScheduler()
    """The learning rate's course over the run."""
