"""Interfaces of the two models of a run: the sampler that serves the policy, and the learner that trains it.

`Sampler` and `VllmSampler`, and `Learner`, implement these protocols. This module imports neither torch nor them.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from harbortrainer.engines.programs import WatchedProcess

if TYPE_CHECKING:
    import torch
    from peft import LoraConfig
    from transformers import PreTrainedModel

    from harbortrainer.engines.local.learner.training_sample import Sample
    from harbortrainer.engines.local.sampler import Completion
    from harbortrainer.engines.local.sampler.rescoring import Rescored


class CompletionLogProtocol(Protocol):
    """Completions of the sampler, by session."""

    @property
    def total(self) -> int: ...
    @property
    def discarded_tokens(self) -> int: ...
    def pop(self, session_id: str) -> "list[Completion]": ...
    def evict(self, first: int) -> None: ...


class SamplerProtocol(Protocol):
    """A sampler that serves the policy."""

    @property
    def url(self) -> str: ...
    @property
    def completion_log(self) -> CompletionLogProtocol: ...
    def load_adapter(self, source: "Mapping[str, torch.Tensor]", version: int, *, config: "LoraConfig") -> float: ...
    def load_weights(self, source: "Mapping[str, torch.Tensor]", version: int) -> float: ...
    def rescore(self) -> "Sequence[Rescored]": ...
    def stats(self) -> dict[str, float]: ...
    def stop(self) -> None: ...


class ServedPolicy(SamplerProtocol, Protocol):
    """A started sampler with its model and processes."""

    @property
    def model(self) -> "PreTrainedModel | None": ...
    @property
    def processes(self) -> Sequence[WatchedProcess]: ...


class LearnerProtocol(Protocol):
    """A learner that trains the policy: each call of `train` makes one update and one new version."""

    @property
    def version(self) -> int: ...
    @property
    def adapter_config(self) -> Mapping[str, object] | None: ...
    def weights(self, version: int) -> "Mapping[str, torch.Tensor]": ...
    def train(self, samples: "Sequence[Sample]", rescored: "Sequence[Rescored]" = ()) -> dict[str, float]: ...
    def save(self, folder: Path) -> None: ...
