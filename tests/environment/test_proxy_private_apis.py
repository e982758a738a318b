"""The installed LiteLLM has the private API that the model proxy uses; a failure names the release."""

from importlib.metadata import version

import pytest

from harbortrainer.environment.model_proxy import anthropic_messages, openai_responses
from harbortrainer.private_apis import PrivateApi, fault_at


@pytest.mark.parametrize("couplings", [anthropic_messages.PRIVATE_APIS, openai_responses.PRIVATE_APIS])
def test_installed_litellm_has_private_api(couplings: PrivateApi) -> None:
    for place in couplings.places:
        fault = fault_at(place)
        told = f"{fault}: litellm {version('litellm')} is installed, {couplings.used_by} was written for litellm"
        assert not fault, f"{told} {couplings.written_for}"
