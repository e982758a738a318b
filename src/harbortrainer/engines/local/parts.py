"""The two models of a run: the one that is sampled from and the one that is trained, and what the loop asks of them.

`Sampler` or `VllmSampler`, and `Learner`, fulfil these protocols; torch and transformers are imported when they are
made.
"""

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from harbortrainer.config.runfile import RunConfig
from harbortrainer.engines.programs import WatchedProcess
from harbortrainer.runs.folder import RunFolder
from harbortrainer.runs.label import RUN_VARIABLE, run_label

if TYPE_CHECKING:
    import torch
    from peft import LoraConfig
    from transformers import PreTrainedModel

    from harbortrainer.engines.local.learner.learner import Learner
    from harbortrainer.engines.local.learner.training_sample import Sample
    from harbortrainer.engines.local.sampler import Completion
    from harbortrainer.engines.local.sampler.rescoring import ScoredAgain
    from harbortrainer.engines.memory_plan import MemoryPlan

DECIDES = ("r", "lora_alpha", "lora_dropout", "target_modules", "bias", "task_type")
"""The keys of an adapter's config that decide what it computes."""


class LedgerPart(Protocol):
    """What the sampler sampled, by session."""

    @property
    def entered(self) -> int: ...
    def take(self, session_id: str) -> "list[Completion]": ...
    def forget(self, first: int) -> None: ...


class SamplerPart(Protocol):
    """Serves the policy."""

    @property
    def url(self) -> str: ...
    @property
    def ledger(self) -> LedgerPart: ...
    def load_adapter(self, source: "Mapping[str, torch.Tensor]", version: int, *, config: "LoraConfig") -> float: ...
    def load_weights(self, source: "Mapping[str, torch.Tensor]", version: int) -> float: ...
    def score_again(self) -> "Sequence[ScoredAgain]": ...
    def stats(self) -> dict[str, float]: ...
    def stop(self) -> None: ...


class ServedPolicy(SamplerPart, Protocol):
    """A sampler as it was started."""

    @property
    def model(self) -> "PreTrainedModel | None": ...
    @property
    def processes(self) -> Sequence[WatchedProcess]: ...


class LearnerPart(Protocol):
    """Trains the policy: one call, one update, one new version."""

    @property
    def version(self) -> int: ...
    @property
    def adapter_config(self) -> Mapping[str, object] | None: ...
    def weights(self, version: int) -> "Mapping[str, torch.Tensor]": ...
    def train(self, samples: "Sequence[Sample]", rescored: "Sequence[ScoredAgain]" = ()) -> dict[str, float]: ...
    def save(self, folder: Path) -> None: ...
    def load(self, folder: Path) -> None: ...


def planned_memory(model: str, config: RunConfig) -> "MemoryPlan | None":
    """What sampler and learner may take of the GPU.

    None on a CPU, whose cache is small by itself, beside vLLM, which has its own share, and for a model that cannot be
    counted. Where every weight is trained a CPU's memory is counted too, to refuse what has no room.

    Raises:
        UserError: There is no room.
    """
    import psutil
    import torch

    from harbortrainer.engines.engine_choice import USABLE
    from harbortrainer.engines.memory_count import plan_memory

    on_gpu, host = torch.cuda.is_available(), int(USABLE * psutil.virtual_memory().total)
    if config.inference.engine == "vllm" or not (on_gpu or config.lora is None):
        return None
    try:
        plan = plan_memory(
            Path(model),
            config.lora,
            kind="cuda" if on_gpu else "cpu",
            room=int(USABLE * torch.cuda.mem_get_info()[1]) if on_gpu else host,
            quantization=config.model.quantization,
            off_policy=config.orchestrator.max_off_policy_steps,
        )
    except RuntimeError:
        return None
    if refusal := plan.refusal(config.max_model_len, config.seq_len) or plan.host_refusal(host):
        raise refusal
    return plan if on_gpu else None


def start_sampler(model: str, config: RunConfig, plan: "MemoryPlan | None" = None) -> ServedPolicy:
    """The policy (its folder or hub id), served; its cache is the plan's."""
    import torch
    from transformers.utils.logging import disable_progress_bar

    if not torch.cuda.is_available():
        # Two engines share the cores: threads that wait for each other by spinning cost more than they give.
        torch.set_num_threads(1)
    if Path(model).is_dir():
        disable_progress_bar()
    port = config.orchestrator.model.client.port
    if config.inference.engine == "vllm":
        return _start_vllm(model, config, RunFolder(config.run_dir), port)
    from harbortrainer.engines.local.sampler import Sampler

    cached = plan.cache(config.max_model_len, config.seq_len) if plan else None
    return Sampler(
        model,
        max_model_len=config.max_model_len,
        seed=config.seed,
        port=port,
        cache_tokens=cached,
        quantization=config.model.quantization,
    ).start()


def _start_vllm(model: str, config: RunConfig, run: RunFolder, port: int) -> ServedPolicy:
    from harbortrainer.engines.local.learner.lora_policy import adapted_layers
    from harbortrainer.engines.vllm.vllm_sampler import VllmSampler

    assert config.lora is not None, "vLLM is handed adapters only"
    return VllmSampler(
        model,
        max_model_len=config.max_model_len,
        folder=run.path / "served_adapters",
        log=run.log / "vllm.log",
        dtype="bfloat16" if _device() == "cuda" else "float32",
        memory_share=config.inference.vllm_share,
        lora_rank=config.lora.rank,
        adapted=adapted_layers(model, config.lora),
        seed=config.seed,
        variables={RUN_VARIABLE: run_label(run.path)},
        port=port,
    ).start()


def _device() -> str:
    """Where the learner is when it loads its own weights; it has the dtype that is usual there."""
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def load_learner(model: str, config: RunConfig, sampler: ServedPolicy, plan: "MemoryPlan | None" = None) -> "Learner":
    """The same policy, to be trained: on the weights of the sampler's model, which has no adapter yet, or on its own
    where every weight is trained or the sampler's are in another process. Its micro batch is the plan's."""
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
        device=_device(),
        seed=config.seed,
        keep_versions=config.orchestrator.max_off_policy_steps + 1,
        micro_batch_tokens=plan.micro_batch(config.max_model_len, config.seq_len) if plan else None,
    )


def hand_over(learner: LearnerPart, sampler: SamplerPart) -> float:
    """Give the learner's newest version to the sampler. Returns the seconds it took."""
    started = time.monotonic()
    weights, adapter = learner.weights(learner.version), learner.adapter_config
    if adapter is None:
        sampler.load_weights(weights, learner.version)
    else:
        from peft import LoraConfig

        config = LoraConfig(**{key: adapter[key] for key in DECIDES})  # ty: ignore[invalid-argument-type]
        sampler.load_adapter(weights, learner.version, config=config)
    return time.monotonic() - started
