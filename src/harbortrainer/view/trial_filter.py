"""Which trials a page shows, as it stands in its address: a link shows somebody else the same.

Contract: what `TrialFilter.read` takes, `query` writes again; a value that means nothing is an `AddressError`. Pure.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Self
from urllib.parse import urlencode

from harbortrainer.errors import UserError

PAGE = 50
"""Trials on a page."""
SORTS = ("step", "reward", "advantage", "turns", "tokens", "seconds", "task", "outcome")
KINDS = ("train", "eval")


class AddressError(UserError):
    """An address that cannot be meant."""


@dataclass(frozen=True, slots=True)
class TrialFilter:
    """Which trials, in what order, and which page of them."""

    kind: str = ""
    """`train` or `eval`; empty for both."""
    task: str = ""
    """The task's name."""
    source: str = ""
    """The source's name."""
    outcome: str = ""
    """How they ended."""
    step: str = ""
    """`3`, or from and to: `3..7`, either may be missing."""
    reward: str = ""
    """`1`, `0..0.5`, or `none` for trials without one."""
    trained: str = ""
    """`yes`, `no`, or why not, in the words of the run's rows."""
    group: str = ""
    """The group's id."""
    sort: str = ""
    """A column; with `-` before it from the largest on. Empty: the newest first."""
    page: int = 1

    @classmethod
    def read(cls, query: Mapping[str, str]) -> Self:
        """From the parameters of an address; others are left alone.

        Raises:
            AddressError: A value that cannot be meant.
        """
        known = {field.name: query[field.name] for field in fields(cls) if query.get(field.name)}
        page = known.pop("page", "1")
        if not page.isascii() or not page.isdecimal() or int(page[:9]) == 0:
            raise AddressError(f"page {page[:40]!r} is no number", do="count pages from 1")
        found = cls(**known, page=int(page[:9]))
        if found.sort.removeprefix("-") not in ("", *SORTS):
            raise AddressError(f"sort {found.sort[:40]!r} is no column", do=f"one of {', '.join(SORTS)}")
        if found.kind not in ("", *KINDS):
            raise AddressError(f"kind {found.kind[:40]!r} is unknown", do="train or eval")
        _ = found.steps, found.rewards
        return found

    @property
    def steps(self) -> tuple[float, float] | None:
        """First and last step; None for all."""
        return _span(self.step, "step")

    @property
    def rewards(self) -> tuple[float, float] | None:
        """Least and largest reward; None for all, and where `graded` is False."""
        return None if self.reward == "none" else _span(self.reward, "reward")

    def query(self, **change: object) -> str:
        """The parameters of the address of these trials, `change` applied; page 1 unless it is said."""
        new = replace(self, **({"page": 1} | change))
        said = {field.name: getattr(new, field.name) for field in fields(new)}
        return urlencode(
            {name: value for name, value in said.items() if value not in ("", None) and (name, value) != ("page", 1)}
        )

    @property
    def words(self) -> list[tuple[str, str]]:
        """Each thing that is asked for, by the name it has in the address."""
        names = ("kind", "task", "source", "outcome", "step", "reward", "trained", "group")
        return [(name, getattr(self, name)) for name in names if getattr(self, name)]


def _span(text: str, name: str) -> tuple[float, float] | None:
    if not text:
        return None
    first, dots, last = text.partition("..")
    try:
        low = float(first) if first else float("-inf")
        high = (float(last) if last else float("inf")) if dots else low
    except ValueError:
        low = high = float("nan")
    if not low <= high:
        raise AddressError(f"{name} {text[:40]!r} cannot be read", do=f"write {name}=3, {name}=3..7 or {name}=3..")
    return low, high
