"""The two models of a run: the one that is sampled from and the one that is trained, and what the loop asks of them.

`Sampler` and `Learner` fulfil these protocols; torch and transformers are imported when they are made.
"""

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from harbortrainer.config.runfile import RunConfig

if TYPE_CHECKING:
    import torch
    from peft import LoraConfig

    from harbortrainer.engines.local.learner.learner import Learner
    from harbortrainer.engines.local.learner.training_sample import Sample
    from harbortrainer.engines.local.sampler import Completion, Sampler
    from harbortrainer.engines.local.sampler.rescoring import ScoredAgain

DECIDES = ("r", "lora_alpha", "lora_dropout", "target_modules", "bias", "task_type")
"""The keys of an adapter's config that decide what it computes."""


class LedgerPart(Protocol):
    """What the sampler sampled, by session."""

    def take(self, session_id: str) -> "list[Completion]": ...


class SamplerPart(Protocol):
    """Serves the policy."""

    @property
    def url(self) -> str: ...
    @property
    def ledger(self) -> LedgerPart: ...
    def load_adapter(self, source: "Mapping[str, torch.Tensor]", version: int, *, config: "LoraConfig") -> float: ...
    def score_again(self) -> "Sequence[ScoredAgain]": ...
    def stats(self) -> dict[str, float]: ...
    def stop(self) -> None: ...


class LearnerPart(Protocol):
    """Trains the policy: one call, one update, one new version."""

    @property
    def version(self) -> int: ...
    @property
    def adapter_config(self) -> Mapping[str, object]: ...
    def adapter(self, version: int) -> "Mapping[str, torch.Tensor]": ...
    def train(self, samples: "Sequence[Sample]", rescored: "Sequence[ScoredAgain]" = ()) -> dict[str, float]: ...
    def save(self, folder: Path) -> None: ...
    def load(self, folder: Path) -> None: ...


def start_sampler(model: str, config: RunConfig) -> "Sampler":
    """The policy (its folder or hub id), served."""
    import torch
    from transformers.utils.logging import disable_progress_bar

    from harbortrainer.engines.local.sampler import Sampler

    if not torch.cuda.is_available():
        # Two engines share the cores: threads that wait for each other by spinning cost more than they give.
        torch.set_num_threads(1)
    if Path(model).is_dir():
        disable_progress_bar()
    port = config.orchestrator.model.client.port
    return Sampler(model, max_model_len=config.max_model_len, seed=config.seed, port=port).start()


def load_learner(model: str, config: RunConfig, sampler: "Sampler") -> "Learner":
    """The same policy, to be trained: on the weights of the sampler's model, which has no adapter yet."""
    from harbortrainer.engines.local.learner.learner import Learner

    return Learner(
        model,
        config.lora,
        config.trainer.optim,
        config.trainer.loss,
        scheduler=config.trainer.scheduler,
        max_steps=config.max_steps,
        seq_len=config.seq_len,
        base=sampler.model,
        seed=config.seed,
        keep_versions=config.orchestrator.max_off_policy_steps + 1,
    )


def hand_over(learner: LearnerPart, sampler: SamplerPart) -> float:
    """Give the learner's newest adapter to the sampler. Returns the seconds it took."""
    from peft import LoraConfig

    started = time.monotonic()
    config = LoraConfig(**{key: learner.adapter_config[key] for key in DECIDES})  # ty: ignore[invalid-argument-type]
    sampler.load_adapter(learner.adapter(learner.version), learner.version, config=config)
    return time.monotonic() - started
