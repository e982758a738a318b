"""Every key of Prime-RL's schema has exactly one fate on the embedded engine, and the snapshot is the schema."""

import os
import subprocess
import sys
import types
import typing
from pathlib import Path

import pytest
from pydantic import BaseModel

from harbortrainer.config import keys
from harbortrainer.config.reader import FOREIGN, known_keys
from harbortrainer.config.runfile import RunConfig
from harbortrainer.engines.prime_rl import place

SNAPSHOT = [key for key in known_keys() if key not in keys.OURS]
TOOL = Path(__file__).parents[2] / "tools" / "schema_snapshot.py"


def tables(annotation) -> list[type[BaseModel]]:
    """The tables an annotation names, through unions, lists and Annotated."""
    if typing.get_origin(annotation) is typing.Annotated:
        return tables(typing.get_args(annotation)[0])
    if isinstance(annotation, type):
        return [annotation] if issubclass(annotation, BaseModel) else []
    if typing.get_origin(annotation) in (typing.Union, types.UnionType, list):
        return [table for part in typing.get_args(annotation) for table in tables(part)]
    return []


def fields(table: type[BaseModel], prefix: str = "") -> set[str]:
    """Every dotted key of a table and of the tables in it."""
    found = set()
    for name, field in table.model_fields.items():
        found.add(f"{prefix}{name}")
        if name not in FOREIGN:
            for inner in tables(field.annotation):
                found |= fields(inner, f"{prefix}{name}.")
    return found


HONOURED = fields(RunConfig)


@pytest.mark.parametrize("key", [key for key in SNAPSHOT if not key.endswith(".*")])
def test_a_key_of_prime_rl_is_honoured_or_unused_or_refused(key):
    fate = keys.fate(key)
    if fate == "honoured":
        inside = key.rpartition(".")[0]
        assert key in HONOURED or f"{inside}.*" in SNAPSHOT, f"{key} is neither in RunConfig nor unused nor refused"


def test_what_is_honoured_exists_in_prime_rl():
    ours = {key for key in HONOURED if key.split(".")[0] in keys.OURS}
    assert HONOURED - ours <= set(SNAPSHOT)


@pytest.mark.parametrize("table", [keys.REFUSED, keys.UNUSED, keys.SHARED, keys.ONLY, keys.HONOURED])
def test_what_a_table_of_fates_names_exists_in_prime_rl(table):
    assert set(table) <= set(SNAPSHOT)


@pytest.mark.skipif(not place.find().schema.is_dir(), reason="the submodule prime-rl/ is not populated")
def test_the_snapshot_is_the_schema_of_the_pinned_prime_rl():
    path = os.pathsep.join([str(place.find().schema), str(place.SOURCE)])
    done = subprocess.run(
        [sys.executable, str(TOOL)], env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == SNAPSHOT
