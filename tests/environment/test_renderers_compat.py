"""The installed renderers has the private API that is used."""

import pytest

from harbortrainer.environment.renderers_compat import PRIVATE_APIS, WRITTEN_FOR, has_known_format


def test_private_apis_exist():
    PRIVATE_APIS.check()


@pytest.mark.parametrize(("model", "known"), [("Qwen/Qwen3-8B", True), ("me/mine", False), ("models/Qwen3-8B", False)])
def test_known_chat_format_matches_full_model_name(model, known):
    told = f"renderers {WRITTEN_FOR} looked models up by their whole names; has_known_format counts on it"
    assert has_known_format(model) is known, told
