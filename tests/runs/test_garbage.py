"""What is imported stays out of the garbage collector's rounds for as long as a run plays, and no longer."""

import gc

import pytest

from harbortrainer.runs.memory import imports_left_alone


class Imported:
    """An object of the kind that the collector looks at."""


def looked_at(one: object) -> bool:
    return any(each is one for each in gc.get_objects())


def test_what_was_there_is_not_looked_at_within_the_block_and_is_again_after_it() -> None:
    was_there = Imported()
    assert looked_at(was_there)
    with pytest.raises(RuntimeError, match="ends"), imports_left_alone():
        came_later = Imported()
        assert not looked_at(was_there)
        assert looked_at(came_later)
        raise RuntimeError("the run ends")
    assert looked_at(was_there)
