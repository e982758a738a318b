"""What we use of renderers' private side: it is there, and it means what we take it for."""

import pytest

from harbortrainer.environment.chat_formats import COUPLINGS, WRITTEN_FOR, has_known_format


def test_the_places_are_as_they_were():
    COUPLINGS.check()


@pytest.mark.parametrize(("model", "known"), [("Qwen/Qwen3-8B", True), ("me/mine", False), ("models/Qwen3-8B", False)])
def test_a_known_chat_format_goes_by_the_whole_name(model, known):
    told = f"renderers {WRITTEN_FOR} looked models up by their whole names; has_known_format counts on it"
    assert has_known_format(model) is known, told
