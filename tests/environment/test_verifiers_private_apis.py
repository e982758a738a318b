"""The installed verifiers has the private API that is used; a failure names the release."""

from importlib.metadata import version

import pytest

from harbortrainer.environment.verifiers_compat import PRIVATE_APIS
from harbortrainer.private_apis import fault_at


@pytest.mark.parametrize("place", PRIVATE_APIS.places)
def test_installed_verifiers_has_private_api(place: str):
    fault = fault_at(place)
    told = f"{fault}: verifiers {version('verifiers')} is installed, {PRIVATE_APIS.used_by} was written for verifiers"
    assert not fault, f"{told} {PRIVATE_APIS.written_for}"
