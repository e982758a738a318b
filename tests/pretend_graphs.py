"""CUDA graphs of a GPU that is pretended: what a thread computes while it captures is noted operation by operation, and
computed again at each replay, on the same memory.

What a graph would not do is not done: within a capture nothing that was there before is changed, a number of Python's
is what it was then, and whatever the CPU would have to be told or to give is refused.
"""

import threading
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from typing import Any

import torch
from pretend_streams import STREAMS, Stream
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_HERE = threading.local()
_COPIES = {getattr(torch.ops.aten.where, name) for name in ("Scalar", "ScalarOther", "ScalarSelf")}
"""Operations that copy a number of Python's to the GPU."""


class CaptureError(RuntimeError):
    """What a GPU says of an operation that a graph cannot hold."""


def capturing() -> bool:
    """Whether this thread is within a capture."""
    return getattr(_HERE, "capturing", False)


class Graph:
    """What was captured. Its own memory, like the arguments, is kept as long as it is."""

    def __init__(self) -> None:
        self.steps: list[tuple[Callable, tuple, dict, list[torch.Tensor]]] = []
        self.own: set[int] = set()
        """Addresses of what was made within."""
        self.replays = 0

    def replay(self) -> None:
        self.replays += 1
        read, written = (list(self._from_before(kind)) for kind in ("read", "written"))
        STREAMS.note("replay", read=read, written=written, fresh=False)
        with torch._C.DisableTorchFunction(), torch.inference_mode():
            for func, args, kwargs, made in self.steps:
                for before, now in zip(made, _tensors(func(*args, **kwargs)), strict=True):
                    if before is not now and before.untyped_storage().data_ptr() in self.own and not _is_of(now, args):
                        before.copy_(now)

    def _from_before(self, kind: str) -> Iterable[torch.Tensor]:
        for func, args, kwargs, _ in self.steps:
            changed = _changed(func, args, kwargs)
            for tensor in changed if kind == "written" else _tensors((args, kwargs)):
                if tensor.numel() and _address(tensor) not in self.own:
                    yield tensor

    def reset(self) -> None:
        self.steps.clear()


class _Noting(TorchDispatchMode):
    """Notes operations into a graph; keeps what was there before as it was."""

    def __init__(self, graph: Graph) -> None:
        super().__init__()
        self._graph = graph
        self._before: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func in _COPIES:
            raise CaptureError(f"{func}: operation not permitted when stream is capturing")
        with torch._C.DisableTorchFunction():
            for tensor in _changed(func, args, kwargs):
                if (address := _address(tensor)) not in self._graph.own and address not in self._before:
                    whole = tensor.new_empty(0).set_(tensor.untyped_storage())
                    self._before[address] = whole, whole.clone()
            result = func(*args, **kwargs)
        made = _tensors(result)
        known = {_address(x) for x in _tensors((args, kwargs))}
        self._graph.own |= {_address(x) for x in made} - known
        self._graph.steps.append((func, args, kwargs, made))
        return result

    def undo(self) -> None:
        for whole, before in self._before.values():
            whole.copy_(before)


@contextmanager
def capture(
    graph: Graph, pool: object = None, stream: Stream | None = None, capture_error_mode: str = "global"
) -> Generator[None]:
    """As `torch.cuda.graph`."""
    STREAMS.synchronize()
    noting = _Noting(graph)
    _HERE.capturing = True
    try:
        with STREAMS.on(stream), noting:
            yield
    finally:
        _HERE.capturing = False
        with torch._C.DisableTorchFunction(), torch.inference_mode():
            noting.undo()


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [x for x in tree_leaves(tree) if isinstance(x, torch.Tensor)]


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _is_of(tensor: torch.Tensor, args: tuple) -> bool:
    """Whether it is a view of one of these."""
    return _address(tensor) in {_address(x) for x in _tensors(args)}


def _changed(func: Any, args: tuple, kwargs: dict) -> list[torch.Tensor]:
    """Those of its arguments that it writes to."""
    named = func._schema.arguments
    given = [(argument, args[i] if i < len(args) else kwargs.get(argument.name)) for i, argument in enumerate(named)]
    return [x for a, value in given if a.alias_info is not None and a.alias_info.is_write for x in _tensors(value)]
