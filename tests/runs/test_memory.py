"""Imported objects are excluded from garbage collection only during a run; workers collect young objects rarely."""

import gc
import platform
import subprocess
import sys
import weakref

import pytest

from harbortrainer.runs.memory import EndedObjects, collect_garbage_rarely, frozen_gc


class Imported:
    """An object that the garbage collector tracks."""


def looked_at(one: object) -> bool:
    return any(each is one for each in gc.get_objects())


def test_frozen_gc_ends_with_its_block() -> None:
    was_there = Imported()
    assert looked_at(was_there)
    with pytest.raises(RuntimeError, match="ends"), frozen_gc():
        came_later = Imported()
        assert not looked_at(was_there)
        assert looked_at(came_later)
        raise RuntimeError("the run ends")
    assert looked_at(was_there)


def test_collects_young_objects_rarely() -> None:
    before = gc.get_threshold()
    try:
        gc.set_threshold(700, 11, 12)  # another test of this process may have raised it
        collect_garbage_rarely()
        assert gc.get_threshold() == (2_000_000, 11, 12)
    finally:
        gc.set_threshold(*before)


class Ended:
    """An ended object, in a reference cycle if `cycle`."""

    def __init__(self, cycle: bool) -> None:
        self.itself = self if cycle else None


@pytest.mark.parametrize("cycle", [True, False])
def test_collects_ended_objects_that_cycles_keep(cycle: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    collections: list[int] = []
    collect = gc.collect

    def counted() -> int:
        collections.append(len(alive))
        return collect()

    ended, alive = EndedObjects(most=3), weakref.WeakSet[Ended]()
    monkeypatch.setattr(gc, "collect", counted)
    gc.disable()
    try:
        for _ in range(10):
            one = Ended(cycle)
            alive.add(one)
            ended.add(one)
            del one
    finally:
        gc.enable()
    assert collections == ([4, 4, 4] if cycle else [])
    assert len(alive) == (1 if cycle else 0)


FREED_BUFFERS = """
import ctypes
import re
from pathlib import Path

from harbortrainer.runs.memory import release_freed_memory

libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
libc.memset.argtypes, libc.free.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t], [ctypes.c_void_p]
for _ in range(2):  # after the first time, buffers of this size are in the heap
    buffers = [libc.malloc(4 << 20) for _ in range(100)]
    for buffer in buffers:
        libc.memset(buffer, 1, 4 << 20)
    for buffer in buffers[:-1]:  # the last one keeps the others' memory in the heap
        libc.free(buffer)
release_freed_memory()
print(int(re.search("VmRSS: *([0-9]+)", Path("/proc/self/status").read_text().replace(chr(9), " "))[1]) // 1024)
"""


@pytest.mark.process
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc's malloc")
def test_freed_tensors_leave_the_process() -> None:
    done = subprocess.run([sys.executable, "-c", FREED_BUFFERS], capture_output=True, text=True, check=True, timeout=60)
    assert int(done.stdout) < 200, "MB of the process, after 400 MB were freed twice"
