"""A GPU that is not there: tensors that say that they are on `cuda:0`, and a CPU that computes with them.

What this tells of code for a GPU is all that a machine without one can tell: that it takes a GPU's ways, that tensors
of two devices never meet in one operation, and that the numbers are right. How a GPU rounds, how fast it is, what its
memory holds and how its streams share it is not in it. Nor is what happens within a backward pass, where torch hands
tensors of its own to what was written in Python. Of streams it tells who does not wait (`pretend_streams`), of graphs
what in them held only once (`pretend_graphs`).
"""

import threading
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from pretend_graphs import CaptureError, Graph, capture, capturing
from pretend_streams import STREAMS, Stream
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils import checkpoint
from torch.utils._pytree import tree_leaves, tree_map_only

CARD = torch.device("cuda", 0)
GIB = 1024**3
_MEET = {"copy_", "to", "type_as", "__getitem__", "__setitem__", "index_put_", "__get__", "__set__"}
"""Operations in which a GPU takes tensors of a CPU too: copies, indices, attributes."""
_TELL = {"item", "tolist", "__bool__", "__int__", "__float__", "__index__"}
"""What tells the CPU numbers, which waits for them."""
_SPEAK = {"device", "_parse_to"}
"""What only speaks of devices."""
_HERE = threading.local()
"""`backward`: whether this thread is within a backward pass."""


class DevicesMeetError(RuntimeError):
    """What torch says where tensors of two devices meet in one operation."""


class OnCard(torch.Tensor):
    """A tensor that says that it is on the GPU."""

    @classmethod
    def __torch_function__(cls, func: Callable, types: object, args: tuple = (), kwargs: Any = None) -> Any:
        return operate(func, args, kwargs or {})

    def __deepcopy__(self, memo: dict) -> torch.Tensor:
        with torch._C.DisableTorchFunction():
            copied: torch.Tensor = self.detach().as_subclass(torch.Tensor).clone().as_subclass(OnCard)
        memo[id(self)] = nn.Parameter(copied, self.requires_grad) if isinstance(self, nn.Parameter) else copied
        return memo[id(self)]

    def __format__(self, format_spec: str) -> str:
        return format(self.item(), format_spec) if format_spec else repr(self)


for _name, _said in {"device": CARD, "is_cuda": True, "is_cpu": False}.items():
    setattr(OnCard, _name, property(lambda self, said=_said: said))


class Card(TorchFunctionMode):
    """Where torch makes tensors on the GPU; in the thread that enters it."""

    def __torch_function__(self, func: Callable, types: object, args: tuple = (), kwargs: Any = None) -> Any:
        return operate(func, args, kwargs or {})


def operate(func: Callable, args: tuple, kwargs: dict) -> Any:
    """One operation of torch's: computed on the CPU, its result where a GPU's would be.

    Raises:
        DevicesMeetError: Tensors of two devices are in it.
    """
    name, tensors = getattr(func, "__name__", ""), [x for x in tree_leaves((args, kwargs)) if is_tensor(x)]
    refuse_two_devices(name, tensors)
    on_card = is_on_card(name, tensors, args, kwargs)
    within = getattr(_HERE, "backward", False)
    if name == "backward":
        _HERE.backward = True
    try:
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **kwargs) if name in _SPEAK else on_cpu(func, name, args, kwargs)
            result = tree_map_only(torch.Tensor, lambda tensor: placed(tensor, on_card), result)
            if not within:
                note_use(name, tensors, result)
            return result
    finally:
        if name == "backward":
            _HERE.backward = False


def is_tensor(x: object) -> bool:
    return isinstance(x, torch.Tensor)


def refuse_two_devices(name: str, tensors: list[torch.Tensor]) -> None:
    private = name.startswith("_") and not name.startswith("__")
    if getattr(_HERE, "backward", False) or private or name in _MEET:
        return
    if name == "numpy" and any(isinstance(x, OnCard) for x in tensors):
        raise TypeError("a tensor on the GPU is no array of numpy's")
    # A single number of the CPU's may stand beside what is on a GPU.
    if len({isinstance(x, OnCard) for x in tensors if isinstance(x, OnCard) or x.dim()}) > 1:
        raise DevicesMeetError(f"{name}: tensors on cuda:0 and cpu: {[tuple(x.shape) for x in tensors]}")


def is_on_card(name: str, tensors: list[torch.Tensor], args: tuple, kwargs: dict) -> bool:
    """Whether the result is."""
    if name in ("cpu", "cuda"):
        return name == "cuda"
    if name.endswith("_") and tensors:
        return isinstance(tensors[0], OnCard)  # it is the tensor that was written to
    if name == "to":
        target = args[1] if len(args) > 1 else kwargs.get("device", kwargs.get("other"))
    else:
        target = kwargs.get("device")
    if isinstance(target, torch.Tensor):
        return isinstance(target, OnCard)
    if isinstance(target, str | torch.device):
        return torch.device(target).type == "cuda"
    return any(isinstance(x, OnCard) for x in tensors)


def note_use(name: str, tensors: list[torch.Tensor], result: Any) -> None:
    """Tell the streams what was read and written; a view does neither."""
    used = [x for x in tensors if isinstance(x, OnCard) and x.numel()]
    if not used and not any(isinstance(x, OnCard) for x in tree_leaves(result)):
        return
    if name in ("__setitem__", "copy_") or (name.endswith("_") and not name.endswith("__")):
        wrote = [x for x in used[:1] if x is tensors[0]]
        STREAMS.note(name, read=[x for x in used if x is not tensors[0]], written=wrote, fresh=False)
    else:
        known = {x.untyped_storage().data_ptr() for x in used}
        made = [x for x in tree_leaves(result) if is_tensor(x) and x.numel()]
        made = [x for x in made if x.untyped_storage().data_ptr() not in known]
        if made:
            STREAMS.note(name, read=used, written=[x for x in made if isinstance(x, OnCard)], fresh=True)
    told = used and (name in _TELL or (name in ("cpu", "to") and not isinstance(result, OnCard)))
    given = name == "tensor" or (name in ("cuda", "to") and not used)
    if capturing() and (told or given or (name == "copy_" and len(used) < 2)):
        raise CaptureError(f"{name}: operation not permitted when stream is capturing")
    if told or given:
        STREAMS.note(name, read=used, written=[], fresh=True)
        STREAMS.synchronize(STREAMS.current)  # the CPU waits for what it is told, and for what it gives


def placed(tensor: torch.Tensor, on_card: bool) -> torch.Tensor:
    if isinstance(tensor, OnCard) == on_card:
        return tensor
    return tensor.as_subclass(OnCard if on_card else torch.Tensor)


def on_cpu(func: Callable, name: str, args: tuple, kwargs: dict) -> Any:
    """The operation with the CPU where it names the GPU."""
    if name == "cuda":
        return args[0].cpu()
    if name == "histc" and not args[0].is_floating_point():
        args = (args[0].float(), *args[1:])  # a GPU counts whole numbers, a CPU does not
    named = (str, torch.device)
    args = tuple("cpu" if isinstance(x, named) and str(x).startswith("cuda") else x for x in args)
    device = {"device": "cpu"} if str(kwargs.get("device")).startswith("cuda") else {}
    pinned = {"pin_memory": False} if "pin_memory" in kwargs else {}
    kwargs = kwargs | device | pinned
    if isinstance(func, torch._ops.OpOverload):  # a library's own, in whose Python no operation comes by here
        args, kwargs = tree_map_only(OnCard, lambda tensor: placed(tensor, on_card=False), (args, kwargs))
    return func(*args, **kwargs)


_RUN = threading.Thread.run


def _run_with_card(thread: threading.Thread) -> None:
    with Card():
        _RUN(thread)


@contextmanager
def pretend_gpu(memory: int = 80 * GIB) -> Generator[None]:
    """A GPU with so many bytes free, for this thread and those that are started meanwhile."""
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
        "CUDAGraph": Graph,
        "graph": capture,
        "graph_pool_handle": object,
    }
    checks = checkpoint._allowed_determinism_checks_to_fns
    swaps = torch.__future__.get_swap_module_params_on_conversion()
    STREAMS.forget()
    with ExitStack() as stack:
        for name, pretended in cuda.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, pretended))
        stack.enter_context(mock.patch.object(torch.accelerator, "is_available", lambda: True))
        stack.enter_context(mock.patch.object(torch.accelerator, "current_stream", lambda device=None: STREAMS.current))
        stack.enter_context(mock.patch.object(threading.Thread, "run", _run_with_card))
        # Within a backward pass torch's own tensors do not say that they are on the GPU.
        stack.enter_context(mock.patch.dict(checks, dict.fromkeys(checks, lambda tensor: None)))
        # A module's parameters become others of another class, and stay the same objects.
        torch.__future__.set_swap_module_params_on_conversion(True)
        stack.callback(torch.__future__.set_swap_module_params_on_conversion, swaps)
        stack.enter_context(Card())
        yield
