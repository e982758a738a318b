"""A simulated GPU: tensors that report `cuda:0`, computed on the CPU.

Covered: code takes its GPU branches, no operation mixes tensors of two devices, and the numbers are right.
`pretend_streams` finds missing waits between streams.

Not covered: a GPU's rounding, speed, memory and concurrency; and the inside of a backward pass, where torch passes
tensors of its own to Python functions.
"""

import threading
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any
from unittest import mock

import torch
from pretend_streams import STREAMS, Stream
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils import checkpoint
from torch.utils._pytree import tree_map_only

GPU = torch.device("cuda", 0)
GIB = 1024**3
_MIXED_DEVICE_OPS = {"copy_", "to", "type_as", "__getitem__", "__setitem__", "index_put_", "__get__", "__set__"}
"""Operations that may mix GPU and CPU tensors: copies, indexing, attributes."""
_SYNCHRONIZING_OPS = {"item", "tolist", "__bool__", "__int__", "__float__", "__index__"}
"""Operations that return numbers to the CPU, which waits for them."""
_DEVICE_OPS = {"device", "_parse_to"}
"""Operations about devices only."""
_THREAD = threading.local()
"""`backward`: whether this thread is in a backward pass."""


class DeviceMismatchError(RuntimeError):
    """Stands for torch's error if an operation mixes tensors of two devices."""


class GpuTensor(torch.Tensor):
    """A tensor that reports to be on the GPU."""

    @classmethod
    def __torch_function__(cls, func: Callable, types: object, args: tuple = (), kwargs: Any = None) -> Any:
        return run_operation(func, args, kwargs or {})

    def __deepcopy__(self, memo: dict) -> torch.Tensor:
        with torch._C.DisableTorchFunction():
            copied: torch.Tensor = self.detach().as_subclass(torch.Tensor).clone().as_subclass(GpuTensor)
        memo[id(self)] = nn.Parameter(copied, self.requires_grad) if isinstance(self, nn.Parameter) else copied
        return memo[id(self)]

    def __format__(self, format_spec: str) -> str:
        return format(self.item(), format_spec) if format_spec else repr(self)


for _name, _value in {"device": GPU, "is_cuda": True, "is_cpu": False}.items():
    setattr(GpuTensor, _name, property(lambda self, value=_value: value))


class GpuMode(TorchFunctionMode):
    """Makes torch create tensors on the GPU, in the thread that enters it."""

    def __torch_function__(self, func: Callable, types: object, args: tuple = (), kwargs: Any = None) -> Any:
        return run_operation(func, args, kwargs or {})


def run_operation(func: Callable, args: tuple, kwargs: dict) -> Any:
    """Run a torch operation on the CPU, and place its result on the device that a real GPU would use.

    Raises:
        DeviceMismatchError: It mixes tensors of two devices.
    """
    name, tensors = getattr(func, "__name__", ""), tensors_in((args, kwargs))
    check_devices(name, tensors)
    on_gpu = is_on_gpu(name, tensors, args, kwargs)
    in_backward = getattr(_THREAD, "backward", False)
    if name == "backward":
        _THREAD.backward = True
    try:
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **kwargs) if name in _DEVICE_OPS else on_cpu(func, name, args, kwargs)
            result = placed(result, on_gpu)
            if not in_backward:
                record_use(name, tensors, tensors_in(result))
            return result
    finally:
        if name == "backward":
            _THREAD.backward = False


def tensors_in(value: object) -> list[torch.Tensor]:
    """Return the tensors of an argument or a result; torch's own functions for trees take longer than an operation."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, tuple | list):
        return []
    return [tensor for item in value for tensor in tensors_in(item)]


def placed(value: Any, on_gpu: bool) -> Any:
    """Return the value with all its tensors on one device."""
    if isinstance(value, torch.Tensor):
        return place(value, on_gpu)
    if isinstance(value, tuple | list | dict):
        return tree_map_only(torch.Tensor, lambda tensor: place(tensor, on_gpu), value)
    return value


def check_devices(name: str, tensors: list[torch.Tensor]) -> None:
    private = name.startswith("_") and not name.startswith("__")
    if getattr(_THREAD, "backward", False) or private or name in _MIXED_DEVICE_OPS:
        return
    if name == "numpy" and any(isinstance(x, GpuTensor) for x in tensors):
        raise TypeError("a tensor on the GPU cannot become a numpy array")
    # A CPU scalar may be combined with GPU tensors.
    if len({isinstance(x, GpuTensor) for x in tensors if isinstance(x, GpuTensor) or x.dim()}) > 1:
        raise DeviceMismatchError(f"{name}: tensors on cuda:0 and cpu: {[tuple(x.shape) for x in tensors]}")


def is_on_gpu(name: str, tensors: list[torch.Tensor], args: tuple, kwargs: dict) -> bool:
    """Whether the operation's result is on the GPU."""
    if name in ("cpu", "cuda"):
        return name == "cuda"
    if name.endswith("_") and tensors:
        return isinstance(tensors[0], GpuTensor)  # an in-place operation returns its first tensor
    if name == "to":
        target = args[1] if len(args) > 1 else kwargs.get("device", kwargs.get("other"))
    else:
        target = kwargs.get("device")
    if isinstance(target, torch.Tensor):
        return isinstance(target, GpuTensor)
    if isinstance(target, str | torch.device):
        return torch.device(target).type == "cuda"
    return any(isinstance(x, GpuTensor) for x in tensors)


def record_use(name: str, tensors: list[torch.Tensor], results: list[torch.Tensor]) -> None:
    """Record what was read and written on the current stream; a view does neither."""
    used = [x for x in tensors if isinstance(x, GpuTensor) and x.numel()]
    if not used and not any(isinstance(x, GpuTensor) for x in results):
        return
    if name in ("__setitem__", "copy_") or (name.endswith("_") and not name.endswith("__")):
        written = [x for x in used[:1] if x is tensors[0]]
        STREAMS.record(name, read=[x for x in used if x is not tensors[0]], written=written, fresh=False)
    else:
        used_storages = {x.untyped_storage().data_ptr() for x in used}
        new = [x for x in results if x.numel() and x.untyped_storage().data_ptr() not in used_storages]
        if new:
            STREAMS.record(name, read=used, written=[x for x in new if isinstance(x, GpuTensor)], fresh=True)
    leaves = name in ("cpu", "to") and not any(isinstance(x, GpuTensor) for x in results)
    from_gpu = used and (name in _SYNCHRONIZING_OPS or leaves)
    to_gpu = name == "tensor" or (name in ("cuda", "to") and not used)
    if from_gpu or to_gpu:
        STREAMS.record(name, read=used, written=[], fresh=True)
        STREAMS.synchronize(STREAMS.current)  # the CPU waits for transfers in either direction


def place(tensor: torch.Tensor, on_gpu: bool) -> torch.Tensor:
    if isinstance(tensor, GpuTensor) == on_gpu:
        return tensor
    return tensor.as_subclass(GpuTensor if on_gpu else torch.Tensor)


def on_cpu(func: Callable, name: str, args: tuple, kwargs: dict) -> Any:
    """Run the operation with the CPU in place of the GPU in its arguments."""
    if name == "cuda":
        return args[0].cpu()
    if name == "histc" and not args[0].is_floating_point():
        args = (args[0].float(), *args[1:])  # only a GPU supports integer histograms
    named = (str, torch.device)
    args = tuple("cpu" if isinstance(x, named) and str(x).startswith("cuda") else x for x in args)
    device = {"device": "cpu"} if str(kwargs.get("device")).startswith("cuda") else {}
    pinned = {"pin_memory": False} if "pin_memory" in kwargs else {}
    kwargs = kwargs | device | pinned
    if isinstance(func, torch._ops.OpOverload):  # a library's operator, whose inner operations are not intercepted
        args, kwargs = tree_map_only(GpuTensor, lambda tensor: place(tensor, on_gpu=False), (args, kwargs))
    return func(*args, **kwargs)


_RUN = threading.Thread.run


def _run_with_gpu(thread: threading.Thread) -> None:
    with GpuMode():
        _RUN(thread)


@contextmanager
def pretend_gpu(memory: int = 80 * GIB) -> Generator[None]:
    """Simulate a GPU with this many free bytes, for this thread and threads started meanwhile."""
    cuda = {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "get_device_capability": lambda device=None: (9, 0),
        "mem_get_info": lambda device=None: (memory, memory),
        "get_rng_state_all": list,
        "set_device": lambda device: None,
        "synchronize": lambda device=None: STREAMS.synchronize(),
        "empty_cache": lambda: None,
        "Stream": Stream,
        "current_stream": lambda device=None: STREAMS.current,
        "stream": STREAMS.on,
    }
    determinism_checks = checkpoint._allowed_determinism_checks_to_fns
    swap_params = torch.__future__.get_swap_module_params_on_conversion()
    STREAMS.reset()
    with ExitStack() as stack:
        for name, simulated in cuda.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, simulated))
        stack.enter_context(mock.patch.object(torch.accelerator, "is_available", lambda: True))
        stack.enter_context(mock.patch.object(torch.accelerator, "current_stream", lambda device=None: STREAMS.current))
        stack.enter_context(mock.patch.object(threading.Thread, "run", _run_with_gpu))
        # In a backward pass torch's own tensors do not report to be on the GPU.
        stack.enter_context(mock.patch.dict(determinism_checks, dict.fromkeys(determinism_checks, lambda tensor: None)))
        # Moving a module changes the class of its parameters, which stay the same objects.
        torch.__future__.set_swap_module_params_on_conversion(True)
        stack.callback(torch.__future__.set_swap_module_params_on_conversion, swap_params)
        stack.enter_context(GpuMode())
        yield


def gpu_or_simulation() -> AbstractContextManager[None]:
    """Return a context with a GPU: this machine's where there is one, and a simulated one elsewhere."""
    return nullcontext() if torch.cuda.is_available() else pretend_gpu()
