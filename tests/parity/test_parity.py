"""Each feature of Harbor's in each kind of sandbox, against what Harbor's own trial makes of it.

What Harbor itself and Docker give takes half a minute a feature; it is kept in `played.json`, which `make parity` plays
again. Here the local sandbox is played for real, and the table of docs/harbor.md is compared with what was played.
"""

import asyncio

import pytest
from image_setup import needs_images
from parity_feature import PLACES, Feature, Place
from parity_features import FEATURES
from parity_record import AS_HARBOR, PAGE, found, lacks, page, recorded

RECORD = recorded()
AGAIN = "play it: python tests/parity/parity_record.py"
AT_ONCE: dict[Place, int] = {"host": 8, "image": 8, "docker": 2, "harbor": 2}
EACH = pytest.mark.parametrize("feature", FEATURES, ids=lambda feature: feature.name)


@pytest.fixture(scope="session")
def played(request: pytest.FixtureRequest):
    """What a place makes of the features whose tests were chosen; several at a time, since most of it is waiting."""
    known: dict[Place, dict[str, object]] = {}

    def of(feature: Feature, place: Place) -> object:
        if place not in known:
            chosen = [spec.params for item in request.session.items if (spec := getattr(item, "callspec", None))]
            asked = {p["feature"].name: p["feature"] for p in chosen if isinstance(p.get("feature"), Feature)}
            known[place] = asyncio.run(play_all(list(asked.values()), place))
        what = known[place][feature.name]
        if isinstance(what, BaseException):
            raise what
        return what

    return of


async def play_all(features: list[Feature], place: Place) -> dict[str, object]:
    """What a place makes of each, or what went wrong."""
    gate = asyncio.Semaphore(AT_ONCE[place])

    async def one(feature: Feature) -> object:
        if place in ("docker", "harbor") and lacks(feature):
            return None
        async with gate:
            return await found(feature, place)

    results = await asyncio.gather(*map(one, features), return_exceptions=True)
    return {feature.name: result for feature, result in zip(features, results, strict=True)}


def expected(feature: Feature, place: Place) -> object:
    """What the record has of a place."""
    assert feature.name in RECORD, AGAIN
    known = RECORD[feature.name]
    return known["harbor"] if known[place] == AS_HARBOR else known[place]


@pytest.mark.e2e
@EACH
def test_on_the_hosts_root(feature: Feature, played) -> None:
    assert played(feature, "host") == expected(feature, "host")


@pytest.mark.e2e
@needs_images
@EACH
def test_from_the_tasks_image(feature: Feature, played) -> None:
    assert played(feature, "image") == expected(feature, "image")


@pytest.mark.e2e
@pytest.mark.docker
@pytest.mark.parametrize("place", ["docker", "harbor"])
@EACH
def test_in_containers(feature: Feature, place: Place, played, request: pytest.FixtureRequest) -> None:
    if not request.config.getoption("--in-containers"):
        pytest.skip("takes half a minute: `make parity` plays it")
    request.getfixturevalue("container")
    if missing := lacks(feature):
        pytest.skip(f"{missing} is not here")
    assert played(feature, place) == expected(feature, place)


@EACH
def test_what_differs_from_harbor_is_said(feature: Feature) -> None:
    known = RECORD.get(feature.name)
    assert known is not None, AGAIN
    own = {place: known[place] for place in PLACES if place != "harbor" and place in known}
    refused = {place for place, what in own.items() if isinstance(what, dict) and "refused" in what}
    differs = {place for place, what in own.items() if what != AS_HARBOR} - refused
    if "harbor" in known:
        assert differs == set(feature.differs)
    assert refused == set(feature.refused)
    for place in refused:
        assert feature.refused[place] in "; ".join(own[place]["refused"])


def test_the_table_is_what_was_played() -> None:
    assert PAGE.read_text() == page(RECORD), "python tests/parity/parity_record.py writes it"
