"""verifiers' private side is as we count on it; else the sentence says which release has it not."""

from importlib.metadata import version

import pytest

from harbortrainer.couplings import fault_at
from harbortrainer.environment.verifiers_side import COUPLINGS


@pytest.mark.parametrize("place", COUPLINGS.places)
def test_the_installed_verifiers_has_it_as_we_use_it(place: str):
    fault = fault_at(place)
    told = f"{fault}: verifiers {version('verifiers')} is installed, {COUPLINGS.used_by} was written for verifiers"
    assert not fault, f"{told} {COUPLINGS.written_for}"
