"""The installed renderers has the private API that is used."""

import pytest

from harbortrainer.environment.renderers_compat import PRIVATE_APIS, WRITTEN_FOR, known_format


def test_private_apis_exist():
    PRIVATE_APIS.check()


@pytest.mark.parametrize(("model", "known"), [("Qwen/Qwen3-8B", "qwen3"), ("me/mine", None), ("models/Qwen3-8B", None)])
def test_known_chat_format_matches_full_model_name(model, known):
    told = f"renderers {WRITTEN_FOR} looked models up by their whole names; known_format counts on it"
    assert known_format(model) == known, told
