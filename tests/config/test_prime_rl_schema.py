"""Every key of Prime-RL's schema has exactly one kind of support, and the snapshot equals the pinned schema."""

import os
import re
import subprocess
import sys
import types
import typing
from pathlib import Path

import pytest
from prime_rl_schema import SCHEMA
from pydantic import BaseModel

from harbortrainer.config import prime_rl_schema
from harbortrainer.config import prime_rl_schema as known_keys_module
from harbortrainer.config.algorithm_config import ALGORITHMS, PRIME_RL_ONLY
from harbortrainer.config.orchestrator_config import TRAIN_EXTRA
from harbortrainer.config.prime_rl_schema import known_keys
from harbortrainer.config.runfile import RunConfig
from harbortrainer.engines.prime_rl import checkout

SNAPSHOT = [key for key in known_keys() if key not in {*prime_rl_schema.OWN_KEYS, *prime_rl_schema.NEWER}]
TOOL = Path(__file__).parents[2] / "tools" / "schema_snapshot.py"


def tables(annotation) -> list[type[BaseModel]]:
    """Return the tables in an annotation, through unions, lists and Annotated."""
    if typing.get_origin(annotation) is typing.Annotated:
        return tables(typing.get_args(annotation)[0])
    if isinstance(annotation, type):
        return [annotation] if issubclass(annotation, BaseModel) else []
    if typing.get_origin(annotation) in (typing.Union, types.UnionType, list):
        return [table for part in typing.get_args(annotation) for table in tables(part)]
    return []


def fields(table: type[BaseModel], prefix: str = "") -> set[str]:
    """Return every dotted key of a table and its nested tables."""
    found = set()
    for name, field in table.model_fields.items():
        found.add(f"{prefix}{name}")
        if name not in prime_rl_schema.EXTERNAL_TABLES:
            for inner in tables(field.annotation):
                found |= fields(inner, f"{prefix}{name}.")
    return found


SUPPORTED = fields(RunConfig)


@pytest.mark.parametrize("key", [key for key in SNAPSHOT if not key.endswith(".*")])
def test_every_prime_rl_key_is_supported_unused_or_refused(key):
    if prime_rl_schema.key_support(key) == "supported":
        inside = key.rpartition(".")[0]
        assert key in SUPPORTED or f"{inside}.*" in SNAPSHOT, f"{key} is neither in RunConfig nor unused nor refused"


def test_supported_keys_exist_in_prime_rl():
    ours = {key for key in SUPPORTED if prime_rl_schema.longest(key, prime_rl_schema.OWN_KEYS)}
    assert SUPPORTED - ours <= {*SNAPSHOT, *prime_rl_schema.NEWER}


def test_newer_keys_are_supported_and_unknown_at_the_pinned_commit():
    assert set(prime_rl_schema.NEWER) <= SUPPORTED
    assert not set(prime_rl_schema.NEWER) & set(SNAPSHOT)


@pytest.mark.parametrize(
    "table", [prime_rl_schema.REFUSED, prime_rl_schema.UNUSED, prime_rl_schema.SHARED, prime_rl_schema.SUPPORTED]
)
def test_entries_of_key_support_exist_in_prime_rl(table):
    assert set(table) <= set(SNAPSHOT)


@pytest.mark.skipif(not SCHEMA.is_dir(), reason="the submodule prime-rl/ is not populated")
def test_snapshot_matches_pinned_prime_rl():
    path = os.pathsep.join([str(SCHEMA), str(checkout.SOURCE)])
    done = subprocess.run(
        [sys.executable, str(TOOL)], env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, check=True
    )
    assert done.stdout == known_keys_module.SNAPSHOT.read_text()


@pytest.mark.skipif(not SCHEMA.is_dir(), reason="the submodule prime-rl/ is not populated")
def test_every_prime_rl_algorithm_is_supported_or_refused():
    source = (SCHEMA / "prime_rl/configs/algorithm.py").read_text()
    types = re.findall(r'^class \w+AlgoConfig\(.*\):\n    type: Literal\["(\w+)"\]', source, re.MULTILINE)
    assert sorted(types) == sorted([*ALGORITHMS, *PRIME_RL_ONLY])


def test_fields_that_prime_rl_adds_to_requests_are_accepted():
    assert TRAIN_EXTRA in prime_rl_schema.REFUSED["orchestrator.train.sampling.extra_body"].harmless


def test_no_key_has_two_entries():
    lists = [
        set(prime_rl_schema.UNUSED),
        set(prime_rl_schema.SUPPORTED),
        set(prime_rl_schema.SHARED),
        set(prime_rl_schema.REFUSED),
        set(prime_rl_schema.OWN_KEYS),
        set(prime_rl_schema.NEWER),
    ]
    assert sum(map(len, lists)) == len(set().union(*lists))
