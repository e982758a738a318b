"""Imported objects are excluded from garbage collection only during a run; workers collect young objects rarely."""

import gc

import pytest

from harbortrainer.runs.memory import collect_garbage_rarely, frozen_gc


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
        assert gc.get_threshold() == (20_000, 11, 12)
    finally:
        gc.set_threshold(*before)
