"""The learner's keys: Prime-RL's own names and defaults, read without torch.

Each class mirrors one table of Prime-RL's trainer config at commit 559b44772
(packages/prime-rl-configs/src/prime_rl/configs/trainer.py). A key that is not here is one that the learner
does not honour; it is refused, never ignored.
"""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field


class Settings(BaseModel):
    """A table that refuses keys it does not know."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class LoraSettings(Settings):
    """`[trainer.model.lora]`."""

    rank: int = Field(16, ge=1)
    """Rank of the two low-rank matrices."""

    alpha: float = Field(32.0, ge=0)
    """The update is scaled by alpha / rank."""

    dropout: float = Field(0.0, ge=0, le=1)
    """Dropout on the input of the low-rank path while training; costs one more forward a step (for the
    proof)."""

    target_modules: list[str] = [
        "q_proj",
        "k_proj",
        "v_proj",
        "o_proj",
        "gate_proj",
        "up_proj",
        "down_proj",
        "experts",
        "fc1_latent_proj",
        "fc2_latent_proj",
    ]
    """Linear layers that are adapted: a plain name matches any part of the layer's path, a pattern is
    searched in it; names that the model does not have are skipped."""


class OptimSettings(Settings):
    """`[trainer.optim]`, type adamw."""

    type: Literal["adamw"] = "adamw"
    """The optimizer; only AdamW here."""

    lr: float = Field(1e-6, ge=0)
    """Peak learning rate."""

    weight_decay: float = Field(0.01, ge=0)
    """Decoupled weight decay."""

    max_norm: float | None = Field(1.0, ge=0)
    """The gradient's norm is clipped to this; None turns clipping off."""

    betas1: float = Field(0.9, ge=0)
    """Decay of AdamW's first moment."""

    betas2: float = Field(0.999, ge=0)
    """Decay of AdamW's second moment."""


class ConstantScheduler(Settings):
    """`[trainer.scheduler]` with type constant, the default."""

    type: Literal["constant"] = "constant"
    """The learning rate stays at its peak."""


class LinearScheduler(Settings):
    """`[trainer.scheduler]` with type linear: up, flat, down."""

    type: Literal["linear"] = "linear"
    """Linear warm-up, then the peak, then a linear decay over the last steps."""

    warmup_steps: int = Field(10, ge=0)
    """Steps from min_lr up to the peak."""

    decay_steps: int = Field(10, ge=0)
    """Steps at the end of the run over which the rate falls to min_lr; needs max_steps."""

    min_lr: float = Field(0.0, ge=0)
    """The lowest learning rate."""


class CosineScheduler(Settings):
    """`[trainer.scheduler]` with type cosine: up, then half a cosine down to the run's end."""

    type: Literal["cosine"] = "cosine"
    """Linear warm-up, then cosine decay until max_steps."""

    warmup_steps: int = Field(10, ge=0)
    """Steps from min_lr up to the peak."""

    min_lr: float = Field(0.0, ge=0)
    """The lowest learning rate."""


SchedulerSettings = Annotated[ConstantScheduler | LinearScheduler | CosineScheduler, Field(discriminator="type")]


class LossSettings(Settings):
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


class LengthPenalty(Settings):
    """`[orchestrator.algo.length_penalty]`: what is subtracted from a trial's reward for being long, off by
    default."""

    type: Literal["linear"] = "linear"
    """The only kind there is."""

    num_output_tokens_weight: float = Field(0.25, ge=0, allow_inf_nan=False)
    """Weight of the sampled tokens, relative to the group's largest count."""

    num_input_tokens_weight: float = Field(0.1, ge=0, allow_inf_nan=False)
    """Weight of the tokens that were not sampled, relative to the group's largest count."""

    num_turns_weight: float = Field(0.1, ge=0, allow_inf_nan=False)
    """Weight of the turns, relative to the group's largest count."""
