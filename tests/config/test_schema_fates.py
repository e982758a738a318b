"""Every key of Prime-RL's schema has exactly one fate on the embedded engine, and the snapshot is the schema."""

import os
import re
import subprocess
import sys
import types
import typing
from pathlib import Path

import pytest
from pydantic import BaseModel

from harbortrainer.config import fates
from harbortrainer.config import known_keys as known_keys_module
from harbortrainer.config.algo_table import ALGORITHMS, PRIME_RLS_ALONE
from harbortrainer.config.known_keys import known_keys
from harbortrainer.config.runfile import RunConfig
from harbortrainer.config.sampling_table import TRAIN_EXTRA
from harbortrainer.engines.prime_rl import checkout

SNAPSHOT = [key for key in known_keys() if key not in fates.OURS]
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
        if name not in fates.FOREIGN:
            for inner in tables(field.annotation):
                found |= fields(inner, f"{prefix}{name}.")
    return found


HONOURED = fields(RunConfig)


@pytest.mark.parametrize("key", [key for key in SNAPSHOT if not key.endswith(".*")])
def test_a_key_of_prime_rl_is_honoured_or_unused_or_refused(key):
    fate = fates.fate(key)
    if fate == "honoured":
        inside = key.rpartition(".")[0]
        assert key in HONOURED or f"{inside}.*" in SNAPSHOT, f"{key} is neither in RunConfig nor unused nor refused"


def test_what_is_honoured_exists_in_prime_rl():
    ours = {key for key in HONOURED if fates.longest(key, fates.OURS)}
    assert HONOURED - ours <= set(SNAPSHOT)


@pytest.mark.parametrize("table", [fates.REFUSED, fates.UNUSED, fates.SHARED, fates.HONOURED])
def test_what_a_table_of_fates_names_exists_in_prime_rl(table):
    assert set(table) <= set(SNAPSHOT)


@pytest.mark.skipif(not checkout.find().schema.is_dir(), reason="the submodule prime-rl/ is not populated")
def test_the_snapshot_is_the_schema_of_the_pinned_prime_rl():
    path = os.pathsep.join([str(checkout.find().schema), str(checkout.SOURCE)])
    done = subprocess.run(
        [sys.executable, str(TOOL)], env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, check=True
    )
    assert done.stdout == known_keys_module.SNAPSHOT.read_text()


@pytest.mark.skipif(not checkout.find().schema.is_dir(), reason="the submodule prime-rl/ is not populated")
def test_every_algorithm_of_the_pinned_prime_rl_is_had_or_refused_by_its_name():
    source = (checkout.find().schema / "prime_rl/configs/algorithm.py").read_text()
    types = re.findall(r'^class \w+AlgoConfig\(.*\):\n    type: Literal\["(\w+)"\]', source, re.MULTILINE)
    assert sorted(types) == sorted([*ALGORITHMS, *PRIME_RLS_ALONE])


def test_what_prime_rl_adds_to_every_request_is_harmless():
    assert TRAIN_EXTRA in fates.REFUSED["orchestrator.train.sampling.extra_body"].harmless


def test_no_key_has_two_fates():
    lists = [set(fates.UNUSED), set(fates.HONOURED), set(fates.SHARED), set(fates.REFUSED), set(fates.OURS)]
    assert sum(map(len, lists)) == len(set().union(*lists))
