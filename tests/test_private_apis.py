"""A changed private name of a library gives a one-line error with the library, its releases and the name."""

from importlib.metadata import version

import pytest

from harbortrainer.errors import UserError
from harbortrainer.private_apis import PrivateApi, fault_at, places_in


@pytest.mark.parametrize(
    "place",
    [
        "pathlib:Path.symlink_to(target, target_is_directory)",
        "pathlib:Path.symlink_to(target, ...)",
        "pytest:MonkeyPatch.setattr(target, name, ...)",
        "pytest:MonkeyPatch._setattr",
        "pathlib:Path.home()",
        "harbortrainer.private_apis:PrivateApi.library",
    ],
)
def test_unchanged_name_has_no_fault(place):
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
        ("harbortrainer.private_apis:_VARIADIC(a)", "harbortrainer.private_apis:_VARIADIC is not a function"),
    ],
)
def test_changed_name_is_described(place, fault):
    assert fault_at(place) == fault


def test_error_names_both_releases_and_the_place():
    changed = PrivateApi(
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
