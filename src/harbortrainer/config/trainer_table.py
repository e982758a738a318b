"""`[trainer]`: model, loss, optimizer and learning-rate schedule.

Names, defaults and meaning are Prime-RL's at commit 559b44772
(`packages/prime-rl-configs/src/prime_rl/configs/trainer.py`). The losses ipo, icepop, ppo and cispo have the keys and
defaults of newer releases. This module does not import torch.
"""

from typing import Annotated, Literal, Self

from pydantic import Field, field_validator, model_validator

from harbortrainer.config.table import Table, TomlTable, error_at
from harbortrainer.errors import choice_advice

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
    """Number of last steps in which the rate decays to min_lr, at most those after the warm-up; needs max_steps."""

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
    if scheduler.warmup_steps + decay == 0:
        raise ValueError("a linear trainer.scheduler needs warmup_steps or decay_steps; use type constant instead")
    if decay and max_steps is None:
        raise ValueError(f"trainer.scheduler.type = {scheduler.type!r} needs max_steps")
    if decay and max_steps is not None and scheduler.warmup_steps >= max_steps:
        what = f"trainer.scheduler.warmup_steps is {scheduler.warmup_steps}, but max_steps is {max_steps}"
        raise ValueError(f"{what}; set warmup_steps below max_steps")


def decay_steps(scheduler: LinearScheduler, max_steps: int) -> int:
    """Return the number of last steps in which the rate decays: `decay_steps`, or all that follow the warm-up.

    Example:
        >>> decay_steps(LinearScheduler(warmup_steps=1, decay_steps=10), 4)
        3
    """
    return min(scheduler.decay_steps, max_steps - scheduler.warmup_steps)


def schedule_note(scheduler: SchedulerSettings, max_steps: int | None) -> str:
    """Return a message on a decay that is shorter than the file says; empty if it is not."""
    if not isinstance(scheduler, LinearScheduler) or max_steps is None:
        return ""
    steps = decay_steps(scheduler, max_steps)
    if steps == scheduler.decay_steps:
        return ""
    return f"the learning rate decays in {steps} steps, not {scheduler.decay_steps}, because max_steps is {max_steps}"


class _Loss(Table):
    """Key of every loss."""

    adv_tau: float = Field(1.0, ge=0)
    """Factor on the advantage; 0 leaves only the KL term."""


class DefaultLoss(_Loss):
    """`[trainer.loss]` with type default: DPPO with KL, the default of Prime-RL at the pinned commit."""

    type: Literal["default"] = "default"
    """Policy loss. Prime-RL has `default` and `ipo` at the pinned commit, all but `default` in newer releases."""

    dppo_mask_low: float = Field(0.2, ge=0)
    """Masks a token with a negative advantage if its probability fell by more than this since sampling."""

    dppo_mask_high: float = Field(0.2, ge=0)
    """Masks a token with a positive advantage if its probability rose by more than this since sampling."""

    kl_tau: float = Field(1e-3, ge=0)
    """Factor on the KL term, which is the squared logarithm of the importance ratio."""


class IpoLoss(_Loss):
    """`[trainer.loss]` with type ipo: importance-weighted policy gradient in a symmetric trust region."""

    type: Literal["ipo"] = "ipo"

    eps: float = Field(0.3, ge=0)
    """Masks a token if its probability changed by more than this since sampling."""

    max_importance_ratio: float = Field(1e4, ge=1)
    """Upper bound of the importance ratio; the token keeps its gradient, with this ratio."""

    kl_tau: float = Field(0.0, ge=0)
    """With ipo the default is 0."""


class IcePopLoss(_Loss):
    """`[trainer.loss]` with type icepop: importance-weighted policy gradient within bounds of the importance ratio."""

    type: Literal["icepop"] = "icepop"

    ratio_low: float = Field(0.2, gt=0)
    """With icepop, masks tokens with a lower importance ratio."""

    ratio_high: float = Field(5.0, gt=0)
    """With icepop, masks tokens with a higher importance ratio."""

    @model_validator(mode="after")
    def _check_bounds(self) -> Self:
        if self.ratio_low > self.ratio_high:
            raise ValueError(f"ratio_low ({self.ratio_low:g}) is above ratio_high ({self.ratio_high:g})")
        return self


class PpoLoss(_Loss):
    """`[trainer.loss]` with type ppo: PPO's clipped surrogate."""

    type: Literal["ppo"] = "ppo"

    ratio_low: float = Field(0.8, gt=0, le=1)
    """With ppo, clips lower importance ratios of tokens with a negative advantage (default 0.8)."""

    ratio_high: float = Field(1.2, ge=1)
    """With ppo, clips higher importance ratios of tokens with a positive advantage (default 1.2)."""

    max_importance_ratio: float = Field(1e4, ge=1)
    """Upper bound of the importance ratio; the token keeps its gradient, with this ratio."""

    @model_validator(mode="after")
    def _check_bounds(self) -> Self:
        if self.max_importance_ratio < self.ratio_high:
            raise ValueError(
                f"max_importance_ratio ({self.max_importance_ratio:g}) is below ratio_high ({self.ratio_high:g})"
            )
        return self


class CispoLoss(_Loss):
    """`[trainer.loss]` with type cispo: a clipped, constant importance weight on the log-probability."""

    type: Literal["cispo"] = "cispo"

    ratio_low: float = Field(0.0, ge=0, le=1)
    """With cispo, lower bound of the weight (default 0)."""

    ratio_high: float = Field(5.0, ge=1)
    """With cispo, upper bound of the weight (default 5)."""


LossSettings = DefaultLoss | IpoLoss | IcePopLoss | PpoLoss | CispoLoss

LOSSES = {"default": DefaultLoss, "ipo": IpoLoss, "icepop": IcePopLoss, "ppo": PpoLoss, "cispo": CispoLoss}


def _read_loss(table: TomlTable) -> LossSettings:
    """Validate `[trainer.loss]` as the loss that it names, by default "default".

    Raises:
        ValidationError: For an unknown name, with the nearest one, for a key of another loss, or for an invalid value.
    """
    name = str(table.get("type", "default"))
    if name == "custom":
        raise error_at(("type",), name, "custom needs Prime-RL; set another loss, or run with --engine prime-rl")
    if name not in LOSSES:
        raise error_at(("type",), name, f"unknown loss {name!r}; {choice_advice(name, LOSSES)}")
    kind = LOSSES[name]
    unknown = next((key for key in table if key not in kind.model_fields), None)
    if unknown is not None:
        keys = ", ".join(sorted(kind.model_fields.keys() - {"type"}))
        raise error_at((unknown,), table[unknown], f"the loss {name} has no such key; it has {keys}")
    return kind.model_validate(table)


def loss_note(loss: LossSettings) -> str:
    """Return a message on defaults of the loss that depend on Prime-RL's release; empty if the file names them."""
    if "type" not in loss.model_fields_set:
        return (
            "no loss is named: trainer.loss.type is 'default' (DPPO with KL), as in Prime-RL at the pinned commit; "
            "newer releases removed it, and their default is 'ipo'"
        )
    if isinstance(loss, IpoLoss) and not {"eps", "kl_tau"} <= loss.model_fields_set:
        return (
            f"the loss ipo has eps = {loss.eps:g} and kl_tau = {loss.kl_tau:g}; without these keys, Prime-RL at the "
            "pinned commit takes 0.1 and 0.001"
        )
    return ""


class TrainedModel(Table):
    """`[trainer.model]`."""

    lora: LoraSettings | None = None
    """LoRA settings; without this table all weights are trained (full fine-tuning)."""


class TrainerConfig(Table):
    """`[trainer]`."""

    model: TrainedModel = TrainedModel()
    """Trained part of the model."""

    loss: LossSettings = DefaultLoss()
    """Policy loss; without a type the default of Prime-RL at the pinned commit."""

    optim: OptimSettings = OptimSettings()
    """Optimizer."""

    scheduler: SchedulerSettings = ConstantScheduler()
    """Learning-rate schedule."""

    @field_validator("loss", mode="before")
    @classmethod
    def _check_loss(cls, table: object) -> object:
        return _read_loss(table) if isinstance(table, dict) else table
