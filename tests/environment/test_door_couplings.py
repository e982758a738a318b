"""LiteLLM's adapters are as the door counts on them; else the sentence says which release has them not."""

from importlib.metadata import version

import pytest

from harbortrainer.couplings import Couplings, fault_at
from harbortrainer.environment.door import anthropic_messages, openai_responses


@pytest.mark.parametrize("couplings", [anthropic_messages.COUPLINGS, openai_responses.COUPLINGS])
def test_the_installed_litellm_has_it_as_we_use_it(couplings: Couplings) -> None:
    for place in couplings.places:
        fault = fault_at(place)
        told = f"{fault}: litellm {version('litellm')} is installed, {couplings.used_by} was written for litellm"
        assert not fault, f"{told} {couplings.written_for}"
