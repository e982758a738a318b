"""Factories of a run's models: the memory plan, the sampler and the learner.

torch and transformers are imported when a function is called.
"""

from pathlib import Path
from typing import TYPE_CHECKING

from harbortrainer.config.runfile import RunConfig
from harbortrainer.engines.local.protocols import ServedPolicy
from harbortrainer.runs.folder import RunFolder
from harbortrainer.runs.label import RUN_VARIABLE, run_label

if TYPE_CHECKING:
    from harbortrainer.engines.local.learner.learner import Learner
    from harbortrainer.engines.memory_plan import MemoryPlan


def memory_plan(model: str, config: RunConfig) -> "MemoryPlan | None":
    """Return the memory plan of sampler and learner on a GPU.

    None on a CPU, with vLLM (which has its own share), and for a model whose memory cannot be counted. For full
    fine-tuning on a CPU the host memory is checked too.

    Raises:
        UserError: The memory is too small.
    """
    import psutil
    import torch

    from harbortrainer.engines.engine_choice import USABLE_SHARE
    from harbortrainer.engines.memory_count import plan_memory

    on_gpu, host = torch.cuda.is_available(), int(USABLE_SHARE * psutil.virtual_memory().total)
    if config.inference.engine == "vllm" or not (on_gpu or config.lora is None):
        return None
    try:
        plan = plan_memory(
            Path(model),
            config.lora,
            device_type="cuda" if on_gpu else "cpu",
            capacity=int(USABLE_SHARE * torch.cuda.mem_get_info()[1]) if on_gpu else host,
            quantization=config.model.quantization,
            off_policy=config.orchestrator.max_off_policy_steps,
            dtype=config.inference.vllm.dtype,
        )
    except RuntimeError:
        return None
    if refusal := plan.memory_error(config.max_model_len, config.seq_len) or plan.host_memory_error(host):
        raise refusal
    return plan if on_gpu else None


def start_sampler(
    model: str, config: RunConfig, plan: "MemoryPlan | None" = None, *, api_key: str | None = None
) -> ServedPolicy:
    """Start the sampler.

    Args:
        model: Folder or hub id of the policy.
        config: The run.
        plan: The memory plan, with the size of the cache; None leaves it to the sampler.
        api_key: Key that requests must send; None for a random one.
    """
    import torch

    if not torch.cuda.is_available():
        # Sampler and learner share the cores; threads that spin while they wait cost more than they save.
        torch.set_num_threads(1)
    if config.inference.engine == "vllm":
        return _start_vllm(model, config, RunFolder(config.run_dir), api_key)
    from harbortrainer.engines.local.sampler import Sampler

    cached = plan.cache(config.max_model_len, config.seq_len) if plan else None
    return Sampler(
        model,
        dtype=config.inference.vllm.dtype,
        max_model_len=config.max_model_len,
        seed=config.seed,
        host=config.orchestrator.model.client.host,
        port=config.orchestrator.model.client.port,
        cache_tokens=cached,
        quantization=config.model.quantization,
        api_key=api_key,
    ).start()


def _start_vllm(model: str, config: RunConfig, run: RunFolder, api_key: str | None) -> ServedPolicy:
    from harbortrainer.engines.local.learner.policies import adapted_layers
    from harbortrainer.engines.vllm.vllm_sampler import VllmSampler

    assert config.lora is not None, "vLLM only loads adapters"
    return VllmSampler(
        model,
        max_model_len=config.max_model_len,
        folder=run.path / "served_adapters",
        log=run.log / "vllm.log",
        dtype=_dtype(config),
        memory_share=config.inference.vllm_share,
        lora_rank=config.lora.rank,
        lora_layers=adapted_layers(model, config.lora),
        seed=config.seed,
        variables={RUN_VARIABLE: run_label(run.path)},
        host=config.orchestrator.model.client.host,
        port=config.orchestrator.model.client.port,
        api_key=api_key,
    ).start()


def _device() -> str:
    """Return the device of a learner that loads its own weights."""
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def _dtype(config: RunConfig) -> str:
    """Return the dtype of a base that vLLM and a learner with its own weights load."""
    import torch

    from harbortrainer.engines.local.sampler.sampled_model import resolve_dtype

    return str(resolve_dtype(config.inference.vllm.dtype, torch.device(_device()))).removeprefix("torch.")


def load_learner(model: str, config: RunConfig, sampler: ServedPolicy, plan: "MemoryPlan | None" = None) -> "Learner":
    """Load the same policy for training.

    A LoRA's learner shares the weights of the sampler's model, which has no adapter yet. With full fine-tuning, or with
    a sampler in another process, the learner has weights of its own.

    Args:
        model: Folder or hub id of the policy.
        config: The run.
        sampler: The started sampler.
        plan: The memory plan, with the size of a micro batch; None takes the learner's default.
    """
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
        dtype=_dtype(config),
        seed=config.seed,
        keep_versions=config.orchestrator.max_off_policy_steps + 1,
        micro_batch_tokens=plan.micro_batch(config.max_model_len, config.seq_len) if plan else None,
    )
