"""A library's private side that changed is told in one sentence: which library, which releases, which place."""

from importlib.metadata import version

import pytest

from harbortrainer.couplings import Couplings, fault_at, places_in
from harbortrainer.errors import UserError


@pytest.mark.parametrize(
    "place",
    [
        "pathlib:Path.read_text(encoding, errors)",
        "pathlib:Path.read_text(encoding, ...)",
        "pytest:MonkeyPatch.setattr(target, name, ...)",
        "pytest:MonkeyPatch._setattr",
        "pathlib:Path.home()",
        "harbortrainer.couplings:Couplings.library",
    ],
)
def test_what_is_as_it_was_has_no_fault(place):
    assert fault_at(place) == ""


@pytest.mark.parametrize(
    ("place", "fault"),
    [
        ("pytest.nowhere:x", "there is no module pytest.nowhere"),
        ("pytest:MonkeyPatch._gone", "there is no pytest:MonkeyPatch._gone"),
        ("pytest:Gone.method(a)", "there is no pytest:Gone.method"),
        ("pathlib:Path.exists(other)", "pathlib:Path.exists takes (follow_symlinks), not (other)"),
        ("pathlib:Path.rename(target, other, ...)", "pathlib:Path.rename takes (target), not (target, other, ...)"),
        ("pathlib:Path.rename(...)", "pathlib:Path.rename takes (target), not (...)"),
        ("harbortrainer.couplings:_VARIADIC(a)", "harbortrainer.couplings:_VARIADIC is no function"),
    ],
)
def test_what_is_not_as_it_was_is_named(place, fault):
    assert fault_at(place) == fault


def test_the_error_names_the_installed_release_the_one_written_for_and_the_place():
    changed = Couplings(
        "pytest",
        "2.0",
        "harbortrainer.somewhere",
        places_in({"pytest": "approx; mark", "pytest:MonkeyPatch": "_gone"}),
    )
    assert changed.places == ("pytest:approx", "pytest:mark", "pytest:MonkeyPatch._gone")
    with pytest.raises(UserError) as caught:
        changed.check()
    assert str(caught.value) == (
        f"pytest {version('pytest')}: there is no pytest:MonkeyPatch._gone; harbortrainer.somewhere was written for "
        "pytest 2.0; install pytest 2.0.*"
    )
