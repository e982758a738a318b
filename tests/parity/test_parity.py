"""Each Harbor feature in each kind of sandbox gives the same result as Harbor's own trial.

A trial by Harbor or in Docker takes half a minute, so their results are recorded in `played.json`; `make parity` runs
them again. These tests run the local sandbox and compare the table in docs/harbor.md with the record.
"""

import asyncio

import pytest
from image_setup import needs_images
from parity_feature import PLACES, Feature, Place
from parity_features import FEATURES
from parity_record import AS_HARBOR, PAGE, load_record, missing_tool, page, run_feature

RECORD = load_record()
AGAIN = "run python tests/parity/parity_record.py to record it"
AT_ONCE: dict[Place, int] = {"host": 8, "image": 8, "image tools": 8, "docker": 2, "harbor": 2}
EACH = pytest.mark.parametrize("feature", FEATURES, ids=lambda feature: feature.name)


@pytest.fixture(scope="session")
def played(request: pytest.FixtureRequest):
    """Results of the selected features in a place; several trials run at once, since they mostly wait."""
    known: dict[Place, dict[str, object]] = {}

    def of(feature: Feature, place: Place) -> object:
        if place not in known:
            chosen = [spec.params for item in request.session.items if (spec := getattr(item, "callspec", None))]
            selected = {p["feature"].name: p["feature"] for p in chosen if isinstance(p.get("feature"), Feature)}
            known[place] = asyncio.run(play_all(list(selected.values()), place))
        what = known[place][feature.name]
        if isinstance(what, BaseException):
            raise what
        return what

    return of


async def play_all(features: list[Feature], place: Place) -> dict[str, object]:
    """Run features in a place; return each result or exception by name."""
    gate = asyncio.Semaphore(AT_ONCE[place])

    async def one(feature: Feature) -> object:
        if place in ("docker", "harbor") and missing_tool(feature):
            return None
        async with gate:
            return await run_feature(feature, place)

    results = await asyncio.gather(*map(one, features), return_exceptions=True)
    return {feature.name: result for feature, result in zip(features, results, strict=True)}


def expected(feature: Feature, place: Place) -> object:
    """Return the recorded result of a feature in a place."""
    assert feature.name in RECORD, AGAIN
    known = RECORD[feature.name]
    return known["harbor"] if known[place] == AS_HARBOR else known[place]


@pytest.mark.e2e
@EACH
def test_host_root_gives_recorded_result(feature: Feature, played) -> None:
    assert played(feature, "host") == expected(feature, "host")


@pytest.mark.e2e
@EACH
def test_image_tools_give_recorded_result(feature: Feature, played) -> None:
    assert played(feature, "image tools") == expected(feature, "host")


@pytest.mark.e2e
@needs_images
@EACH
def test_task_image_gives_recorded_result(feature: Feature, played) -> None:
    assert played(feature, "image") == expected(feature, "image")


@pytest.mark.e2e
@pytest.mark.docker
@pytest.mark.parametrize("place", ["docker", "harbor"])
@EACH
def test_container_gives_recorded_result(
    feature: Feature, place: Place, played, request: pytest.FixtureRequest
) -> None:
    if not request.config.getoption("--in-containers"):
        pytest.skip("takes half a minute; run `make parity`")
    request.getfixturevalue("container")
    if missing := missing_tool(feature):
        pytest.skip(f"{missing} is not installed")
    assert played(feature, place) == expected(feature, place)


@EACH
def test_declares_differences_and_refusals(feature: Feature) -> None:
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


def test_docs_table_equals_record() -> None:
    assert PAGE.read_text() == page(RECORD), "run python tests/parity/parity_record.py to write it"
