"""The memory of the device that computes: what is left of it, and what to say when it was not enough."""

from collections.abc import Generator
from contextlib import contextmanager

import psutil
import torch

from harbortrainer.errors import UserError


def free_bytes(device: torch.device) -> int:
    """Bytes that can still be allocated on a device."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return psutil.virtual_memory().available


def is_out_of_memory(error: Exception) -> bool:
    """Whether torch could not allocate, or transformers had counted that it could not; on a CPU torch says so by its
    allocator's name alone."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "DefaultCPUAllocator" in str(error)


@contextmanager
def room_for(what: str, do: str) -> Generator[None]:
    """A block that takes memory.

    Raises:
        UserError: It is not there; says for what, and what to do.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise UserError(f"no memory for {what}", do=do) from error
