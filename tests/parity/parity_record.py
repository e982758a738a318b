"""The recorded results in `played.json`, and the table of them in docs/harbor.md.

    python tests/parity/parity_record.py [PLACE,...] [NAME ...]

runs the trials that are missing from the record and those of the named features, then writes the record and the table.
Invariant: a recorded result belongs to the current feature, whose hash is the key `asked`.
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
from harbortrainer.sandbox.task_requirements import TaskRequirements

RECORD = Path(__file__).with_name("played.json")
PAGE = Path(__file__).parents[2] / "docs" / "harbor.md"
BEGIN, END = "<!-- the table: written by tests/parity -->\n", "<!-- end of the table -->\n"
AS_HARBOR = "as harbor"
NOT_PLAYED = ("refused", "differs", "needs")
AT_ONCE = 2

type Record = dict[str, dict[str, Any]]


def feature_hash(feature: Feature) -> str:
    """Return a hash of the fields that affect the trial."""
    fields = {key: value for key, value in vars(feature).items() if key not in NOT_PLAYED and value}
    return hashlib.sha256(repr(sorted(fields.items())).encode()).hexdigest()[:16]


def load_record() -> Record:
    """Return the recorded results whose feature has not changed."""
    known = json.loads(RECORD.read_text()) if RECORD.is_file() else {}
    return {f.name: known[f.name] for f in FEATURES if known.get(f.name, {}).get("asked") == feature_hash(f)}


def refusal(feature: Feature, place: Place, task: Path) -> list[str]:
    """Return why a place refuses the task before a run. Harbor itself refuses when it creates the trial."""
    if place == "harbor":
        return []
    requirements = TaskRequirements(feature.write(task))
    kind = "docker" if place == "docker" else "local"
    return [*requirements.unsupported(kind, KWARGS[place]), *requirements.unset_variables(feature.host_env)]


async def run_feature(feature: Feature, place: Place) -> object:
    """Run a feature in a place; return the result or the refusal, in the form of the record."""
    with tempfile.TemporaryDirectory(prefix="parity-") as folder:
        if reasons := refusal(feature, place, Path(folder) / "requested"):
            return {"refused": reasons}
        name = f"parity-{feature_hash(feature)}-{place}"
        (trial := Path(folder) / name).mkdir()
        try:
            return (await play(feature, place, trial)).to_json()
        except HarborRefusedError as error:
            return {"refused": [str(error)]}


def missing_tool(feature: Feature) -> str:
    """Return the tool that the feature needs in containers if this machine lacks it, else ""."""
    if feature.needs != "buildx":
        return ""
    done = subprocess.run(["docker", "buildx", "version"], capture_output=True, check=False)
    return "" if shutil.which("docker") and done.returncode == 0 else "buildx"


def cell(feature: Feature, known: dict[str, Any], place: Place) -> str:
    """Return one cell of the table."""
    what = known.get(place)
    what = known["harbor"] if what == AS_HARBOR else what
    if what is None:
        return f"not tested: needs {feature.needs}" if feature.needs else "not tested"
    if "refused" in what:
        return f"refused: {'; '.join(what['refused'])}"
    return str(Played(**what))


def same(feature: Feature, known: dict[str, Any]) -> str:
    """Return the last cell of a row."""
    if feature.differs:
        return "no: " + "; ".join(sorted(set(feature.differs.values())))
    refused = [place for place in PLACES if isinstance(known.get(place), dict) and "refused" in known[place]]
    if "harbor" not in known:
        return "not tested"
    if "harbor" in refused:
        return "yes" if len(refused) == len(PLACES) else "no"
    return "yes" if not refused else "yes, where supported"


def table(record: Record) -> str:
    """Return the table of docs/harbor.md."""
    lines = [
        "| feature | `local`, host's root | `local`, task's image | our `docker` | Harbor itself | same? |",
        "|---|---|---|---|---|---|",
    ]
    for feature in FEATURES:
        known = record.get(feature.name, {})
        cells = [feature.name, *(cell(feature, known, place) for place in PLACES), same(feature, known)]
        lines.append("| " + " | ".join(text.replace("|", "\\|") for text in cells) + " |")
    return "\n".join(lines) + "\n"


def page(record: Record) -> str:
    """Return docs/harbor.md with the current table."""
    before, _, rest = PAGE.read_text().partition(BEGIN)
    return before + BEGIN + table(record) + END + rest.partition(END)[2]


def write(record: Record) -> None:
    """Write the record and docs/harbor.md."""
    for known in record.values():
        known.update(
            {place: AS_HARBOR for place in PLACES[:-1] if place in known and known[place] == known.get("harbor")}
        )
    ordered = {f.name: record[f.name] for f in FEATURES if f.name in record}
    write_whole(RECORD, json.dumps(ordered, indent=1) + "\n")
    if PAGE.is_file():
        write_whole(PAGE, page(record))


async def run_missing(record: Record, places: tuple[Place, ...], rerun: list[str]) -> None:
    """Run the missing trials, two at a time."""
    gate = asyncio.Semaphore(AT_ONCE)

    async def one(feature: Feature) -> None:
        known = record.setdefault(feature.name, {"asked": feature_hash(feature)})
        for place in sorted(places, key=lambda place: place != "harbor"):
            todo = place not in known or any(name in feature.name for name in rerun)
            if not todo or (place in ("docker", "harbor") and missing_tool(feature)):
                continue
            async with gate:
                what = await run_feature(feature, place)
            known[place] = AS_HARBOR if place != "harbor" and what == known.get("harbor") else what
            if place == "harbor":
                known["release"] = version("harbor")
            print(f"{feature.name} | {place} | {cell(feature, known, place)} | {known[place] == AS_HARBOR}", flush=True)
            write(record)

    for done in await asyncio.gather(*map(one, FEATURES), return_exceptions=True):
        if isinstance(done, BaseException):
            print(repr(done), file=sys.stderr)


if __name__ == "__main__":
    requested = sys.argv[1].split(",") if len(sys.argv) > 1 else PLACES
    now = load_record()
    asyncio.run(run_missing(now, tuple(place for place in PLACES if place in requested), sys.argv[2:]))
    write(now)
