"""What was played, kept in `played.json`, and the table that is made of it for docs/harbor.md.

    python tests/parity/parity_record.py [PLACE,...] [NAME ...]

plays what the record lacks (and what is named), writes the record and the table. Invariant: what is recorded of a
feature belongs to the feature as it is now: `asked` is its hash.
"""

import asyncio
import hashlib
import json
import shutil
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))

from parity_feature import PLACES, Feature, Place
from parity_features import FEATURES
from parity_play import KWARGS, HarborRefusedError, Played, play

from harbortrainer.runs.durable import write_whole
from harbortrainer.sandbox.task_demands import TaskDemands

RECORD = Path(__file__).with_name("played.json")
PAGE = Path(__file__).parents[2] / "docs" / "harbor.md"
BEGIN, END = "<!-- the table: written by tests/parity -->\n", "<!-- end of the table -->\n"
AS_HARBOR = "as harbor"
NOT_PLAYED = ("refused", "differs", "needs")
AT_ONCE = 2

type Record = dict[str, dict[str, Any]]


def asked(feature: Feature) -> str:
    """Hash of what is played."""
    said = {key: value for key, value in vars(feature).items() if key not in NOT_PLAYED and value}
    return hashlib.sha256(repr(sorted(said.items())).encode()).hexdigest()[:16]


def recorded() -> Record:
    """What is known of the features as they are now."""
    known = json.loads(RECORD.read_text()) if RECORD.is_file() else {}
    return {f.name: known[f.name] for f in FEATURES if known.get(f.name, {}).get("asked") == asked(f)}


def refusal(feature: Feature, place: Place, task: Path) -> list[str]:
    """Why the task is refused in a place before any run; Harbor itself refuses when its trial is made."""
    if place == "harbor":
        return []
    demands = TaskDemands(feature.write(task))
    kind = "docker" if place == "docker" else "local"
    return [*demands.beyond(kind, KWARGS[place]), *demands.unset(feature.host_env)]


async def found(feature: Feature, place: Place) -> object:
    """What a place makes of a feature, as the record has it: what was played, or why it is refused."""
    with tempfile.TemporaryDirectory(prefix="parity-") as folder:
        if why := refusal(feature, place, Path(folder) / "asked"):
            return {"refused": why}
        name = f"parity-{asked(feature)}-{place}"
        (trial := Path(folder) / name).mkdir()
        try:
            return (await play(feature, place, trial)).to_json()
        except HarborRefusedError as error:
            return {"refused": [str(error)]}


def lacks(feature: Feature) -> str:
    """What this machine lacks for the feature in containers."""
    if feature.needs != "buildx":
        return ""
    done = subprocess.run(["docker", "buildx", "version"], capture_output=True, check=False)
    return "" if shutil.which("docker") and done.returncode == 0 else "buildx"


def cell(feature: Feature, known: dict[str, Any], place: Place) -> str:
    """One cell of the table."""
    what = known.get(place)
    what = known["harbor"] if what == AS_HARBOR else what
    if what is None:
        return f"not played: {feature.needs or 'nobody has'}"
    if "refused" in what:
        return f"refused: {'; '.join(what['refused'])}"
    return str(Played(**what))


def same(feature: Feature, known: dict[str, Any]) -> str:
    """The last cell of a row."""
    if feature.differs:
        return "no: " + "; ".join(sorted(set(feature.differs.values())))
    refused = [place for place in PLACES if isinstance(known.get(place), dict) and "refused" in known[place]]
    if "harbor" not in known:
        return "not compared"
    if "harbor" in refused:
        return "yes" if len(refused) == len(PLACES) else "no"
    return "yes" if not refused else "yes, where it is played"


def table(record: Record) -> str:
    """The table of docs/harbor.md."""
    lines = [
        "| feature | local, host's root | local, image | docker | Harbor itself | same? |",
        "|---|---|---|---|---|---|",
    ]
    for feature in FEATURES:
        known = record.get(feature.name, {})
        cells = [feature.name, *(cell(feature, known, place) for place in PLACES), same(feature, known)]
        lines.append("| " + " | ".join(text.replace("|", "\\|") for text in cells) + " |")
    return "\n".join(lines) + "\n"


def page(record: Record) -> str:
    """docs/harbor.md with the table of the record."""
    before, _, rest = PAGE.read_text().partition(BEGIN)
    return before + BEGIN + table(record) + END + rest.partition(END)[2]


def write(record: Record) -> None:
    """Write the record and the page."""
    for known in record.values():
        known.update(
            {place: AS_HARBOR for place in PLACES[:-1] if place in known and known[place] == known.get("harbor")}
        )
    ordered = {f.name: record[f.name] for f in FEATURES if f.name in record}
    write_whole(RECORD, json.dumps(ordered, indent=1) + "\n")
    if PAGE.is_file():
        write_whole(PAGE, page(record))


async def complete(record: Record, places: tuple[Place, ...], again: list[str]) -> None:
    """Play what is missing, two at a time."""
    gate = asyncio.Semaphore(AT_ONCE)

    async def one(feature: Feature) -> None:
        known = record.setdefault(feature.name, {"asked": asked(feature)})
        for place in sorted(places, key=lambda place: place != "harbor"):
            todo = place not in known or any(name in feature.name for name in again)
            if not todo or (place in ("docker", "harbor") and lacks(feature)):
                continue
            async with gate:
                what = await found(feature, place)
            known[place] = AS_HARBOR if place != "harbor" and what == known.get("harbor") else what
            if place == "harbor":
                known["release"] = version("harbor")
            print(f"{feature.name} | {place} | {cell(feature, known, place)} | {known[place] == AS_HARBOR}", flush=True)
            write(record)

    for done in await asyncio.gather(*map(one, FEATURES), return_exceptions=True):
        if isinstance(done, BaseException):
            print(repr(done), file=sys.stderr)


if __name__ == "__main__":
    told = sys.argv[1].split(",") if len(sys.argv) > 1 else PLACES
    now = recorded()
    asyncio.run(complete(now, tuple(place for place in PLACES if place in told), sys.argv[2:]))
    write(now)
