"""Inventories list the sandboxes that exist now, including those that a killed process left.

An environment type's entry names the module of its inventory, with the functions of `Inventory`. That of a remote type
runs as a script, in a Python that has the provider's package. `MODULE find [RUN]` prints a JSON list, and
`MODULE end ID...` prints nothing.

Invariant: an inventory finds only sandboxes that this project started.
"""

import json
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Protocol, cast

from harbortrainer.config.environment_table import ENVIRONMENT_TYPES, environment_entry
from harbortrainer.runs.label import OwnerState, owner_state

TIMEOUT_S = 120.0


class InventoryError(Exception):
    """Sandboxes could not be listed or ended; the message has the words of the program that failed."""


class Inventory(Protocol):
    """Lists and ends the sandboxes of one environment type. Both functions raise `InventoryError`."""

    def find(self, run: str, /) -> list[dict[str, str]]:
        """Return the sandboxes of a run, or of all if it is empty, as the fields of `FoundSandbox` except `kind`."""
        ...

    def end(self, ids: Sequence[str], /) -> None:
        """End these sandboxes, and whatever belongs to them."""
        ...


@dataclass(frozen=True)
class FoundSandbox:
    """A sandbox that exists now."""

    kind: str
    """Its environment type."""
    id: str
    run: str
    """The label of its run; "none" if it belongs to no run."""
    task: str = ""
    owner: str = ""
    """Its owner (`runs.label`)."""
    since: str = ""
    """When it was started, in seconds since 1970; "" if that is unknown."""

    @property
    def state(self) -> OwnerState:
        """Whether its owner still runs."""
        return owner_state(self.owner)


class _Script:
    """The inventory of a remote type, run by the first Python that can."""

    def __init__(self, module: str, pythons: Iterable[Path]) -> None:
        spec = find_spec(module)
        assert spec is not None and spec.origin is not None, module
        self._file, self._pythons = spec.origin, [*(str(one) for one in pythons if one.is_file()), sys.executable]

    def find(self, run: str) -> list[dict[str, str]]:
        return json.loads(self._output("find", *filter(None, [run])).splitlines()[-1])

    def end(self, ids: Sequence[str]) -> None:
        self._output("end", *ids)

    def _output(self, *arguments: str) -> str:
        error: InventoryError | None = None
        for python in self._pythons:
            try:
                # -P: the script's folder is not on the path, where its modules could hide the provider's.
                return require_output(python, "-P", self._file, *arguments)
            except InventoryError as failed:  # a Python without the package says less than one whose request fails
                error = error if error and not str(error).startswith(ModuleNotFoundError.__name__) else failed
        assert error is not None
        raise error


def require_output(*command: str) -> str:
    """Return a program's output. Raises `InventoryError` if it is missing, fails, or takes longer than `TIMEOUT_S`."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise InventoryError(" ".join(str(error).split())) from error
    if done.returncode:
        raise InventoryError((done.stderr.strip() or f"{command[0]} failed").splitlines()[-1][:300])
    return done.stdout


def has_inventory(kind: str) -> bool:
    """Whether the sandboxes of an environment type can be listed."""
    return environment_entry(kind).inventory is not None


def resolve_kinds(kinds: Iterable[str]) -> list[str]:
    """Return each environment type once. A type such as `auto` is replaced by the types that it chooses from."""
    return list(dict.fromkeys(one for kind in kinds for one in environment_entry(kind).chosen_from or (kind,)))


def all_kinds() -> list[str]:
    """Return the registered environment types whose sandboxes can be listed."""
    return [kind for kind in resolve_kinds(ENVIRONMENT_TYPES) if has_inventory(kind)]


def inventory(kind: str, pythons: Iterable[Path] = ()) -> Inventory:
    """Return the inventory of an environment type that has one.

    Args:
        kind: The environment type.
        pythons: Interpreters that may have a provider's package, before this process's own.
    """
    entry = environment_entry(kind)
    assert entry.inventory is not None, kind
    return _Script(entry.inventory, pythons) if entry.remote else cast("Inventory", import_module(entry.inventory))


def find_sandboxes(kind: str, run: str = "", pythons: Iterable[Path] = ()) -> list[FoundSandbox]:
    """Return the sandboxes of an environment type, of one run or of all. Raises `InventoryError`."""
    return [FoundSandbox(kind, **fields) for fields in inventory(kind, pythons).find(run)]
