"""What a forward pass over a paged cache reads, for requests of different lengths: from tables of blocks to a plan.

Each request only meets its own keys (`ragged_attention`): requests of few queries, those that decode among them, are
padded to a few common shapes, those that prefill go one by one. Where several begin with the same pages, as the trials
of a group do, these are read once on a CPU.

Contract: for full causal attention only; one plan serves every layer of a forward pass.
"""

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch

_FEW = 16  # queries of a request that goes with others; who has more has a matrix of its own
_LEAST_SAVED = 4  # pages; below it a family costs more than it saves
_CPU = torch.device("cpu")


class Asking(NamedTuple):
    """One request in a forward pass.

    Attributes:
        queries: Its tokens in the flat batch, at least one.
        keys: All its tokens so far, these queries included.
        table: Its blocks in the cache, filled from the first row of the first one on; may be longer than needed.
    """

    queries: int
    keys: int
    table: Sequence[int]


@dataclass(frozen=True, slots=True)
class Bundle:
    """Families of requests, padded to a common shape: F families, M requests in each, Q queries and W pages of each.

    Padding repeats what is there, so that what it computes is the same once more. Each query stands there E times, for
    the heads that share a head of the keys.

    Attributes:
        size: F, M, Q.
        rows: [F * M * Q] positions of their queries in the flat batch.
        own: [F * M * W] pages of the cache that hold their keys, but those that they share.
        real: [F * M, 1, Q * E, W * page size] 0 where a query may look, minus infinity elsewhere; 1 for Q * E where Q
            is 1.
        last: [F * M, 1] of its own rows how many a request with one query sees.
        shared: [F * S] pages that two or more of a family go along; None where a family is one request.
        common: [F, 1, M * Q * E, S * page size] as `real` is for own pages; None where all go to the end.
    """

    size: tuple[int, int, int]
    rows: torch.Tensor
    own: torch.Tensor
    real: torch.Tensor
    last: torch.Tensor
    shared: torch.Tensor | None = None
    common: torch.Tensor | None = None

    def grow(self) -> None:
        """Each request sees one key more, in the pages that it has."""
        self.real.flatten(1).scatter_(1, self.last, 0.0)
        self.last.add_(1)


@dataclass(frozen=True, slots=True)
class PrefillRow:
    """One request with many queries, in the flat batch from `begin` to `end`.

    Attributes:
        pages: The pages that hold its keys; None when it has no past, so that the keys are the batch's own.
        mask: [Q, K] 0 where a query may look, minus infinity elsewhere; None when it has no past (plain causal).
    """

    begin: int
    end: int
    pages: torch.Tensor | None = None
    mask: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class RaggedPlan:
    """What one forward pass reads, the same in every layer."""

    bundles: Sequence[Bundle]
    prefills: Sequence[PrefillRow]


class _Member(NamedTuple):
    """A request of few queries: where they begin in the flat batch; `table` ends with the block of the last key."""

    begin: int
    queries: int
    keys: int
    table: list[int]


class _Family(NamedTuple):
    """Requests, how many pages each of them goes along with others, and these pages' blocks."""

    members: list[_Member]
    along: list[int]
    spine: list[int]


class Planner:
    """Plans forward passes over one cache. What decodes in the pages that it had is not planned anew.

    Args:
        page_size: Rows in a page.
        stride: Pages in a block, those of all layers.
        each: Heads of a query for each of the keys'.
        device, dtype: The cache's.
    """

    def __init__(
        self, page_size: int, stride: int, each: int, device: torch.device = _CPU, dtype: torch.dtype = torch.float32
    ) -> None:
        self._page, self._stride, self._each, self._device, self._dtype = page_size, stride, each, device, dtype
        self._decoding: list[_Member] = []
        self._plan = RaggedPlan([], [])
        self.reads_once = device.type == "cpu"
        """Whether pages that requests share are read once, and not by each of them."""

    def plan(self, asking: Iterable[Asking]) -> RaggedPlan:
        """What a forward pass of these requests, in the order of the batch, reads; good until the next one is made."""
        members: list[_Member] = []
        prefills: list[PrefillRow] = []
        begin = 0
        for queries, keys, table in asking:
            own = table[: -(-keys // self._page)]
            if queries <= _FEW:
                members.append(_Member(begin, queries, keys, list(own)))
            else:
                prefills.append(self._prefill_row(begin, Asking(queries, keys, own)))
            begin += queries
        decoding = members if begin == len(members) else []
        if decoding and decoding == [member._replace(keys=member.keys + 1) for member in self._decoding]:
            for bundle in self._plan.bundles:
                bundle.grow()
        else:
            together = [m for m in members if m.queries == 1], [m for m in members if m.queries > 1]
            self._plan = RaggedPlan([bundle for alike in together for bundle in self._bundles(alike)], prefills)
        self._decoding = decoding
        return self._plan

    def plan_of(self, reads: torch.Tensor) -> RaggedPlan:
        """What requests with one query each read, made of what lies on the device alone, as a graph has to be.

        Args:
            reads: [n, W + 1] of each its blocks, and how many of their rows its query sees.
        """
        blocks, seen = reads[:, :-1], reads[:, -1]
        count, width = blocks.shape
        rows = torch.arange(count, device=self._device)
        real = self._mask(seen, width, self._dtype).view(count, 1, 1, -1)
        return RaggedPlan([Bundle((count, 1, 1), rows, (blocks * self._stride).flatten(), real, seen[:, None])], [])

    def _bundles(self, members: list[_Member]) -> list[Bundle]:
        """Puts those together that are of about one size."""
        families = _kin(members) if self.reads_once else []
        kin = {member.begin for family in families for member in family.members}
        alike: dict[tuple[int, int], list[_Family]] = {}
        for family in families:
            alike.setdefault((_bucket(len(family.spine), 4), _bucket(_width(family), 4)), []).append(family)
        for member in members:
            if member.begin not in kin:
                alike.setdefault((0, _bucket(len(member.table), 2)), []).append(_Family([member], [0], []))
        return [self._bundle(together) for together in alike.values()]

    def _bundle(self, families: list[_Family]) -> Bundle:
        most = max(len(family.members) for family in families)
        queries = max(member.queries for family in families for member in family.members)
        width = max(map(_width, families))
        rows, own, seen, spines, along = [], [], [], [], []
        for family in families:
            spines.append(family.spine)
            along += padded(family.along, most)
            for member, shared in zip(padded(family.members, most), padded(family.along, most), strict=True):
                rows += padded(range(member.begin, member.begin + member.queries), queries)
                own += padded(member.table[shared:], width)
                # Of its own pages the first query sees so many rows, each one after it one more.
                last = member.keys - shared * self._page
                seen += padded(range(last - member.queries + 1, last + 1), queries)
        size, sees = (len(families), most, queries), self._numbers(seen)
        real = self._mask(sees, width, torch.float32 if along[0] else self._dtype).view(
            -1, 1, queries, width * self._page
        )
        if queries > 1:
            real = real.repeat_interleave(self._each, dim=2)
        bundle = Bundle(size, self._numbers(rows), self._pages(own), real, sees[::queries, None].clone())
        return self._with_spines(bundle, spines, along) if along[0] else bundle

    def _with_spines(self, bundle: Bundle, spines: list[list[int]], along: list[int]) -> Bundle:
        longest, (families, _, queries) = max(map(len, spines)), bundle.size
        bundle = replace(bundle, shared=self._pages([block for spine in spines for block in padded(spine, longest)]))
        if min(along) == longest:
            return bundle
        rows = self._numbers(along).repeat_interleave(queries * self._each) * self._page
        common = self._mask(rows, longest, torch.float32).view(families, 1, -1, longest * self._page)
        return replace(bundle, common=common)

    def _prefill_row(self, begin: int, asking: Asking) -> PrefillRow:
        queries, keys, table = asking
        if keys == queries:
            return PrefillRow(begin, begin + queries)
        mask = torch.full((queries, keys), -torch.inf, dtype=self._dtype, device=self._device).triu_(keys - queries + 1)
        return PrefillRow(begin, begin + queries, self._pages(table), mask)

    def _numbers(self, numbers: Sequence[int]) -> torch.Tensor:
        return torch.tensor(numbers, device=self._device)

    def _pages(self, blocks: Sequence[int]) -> torch.Tensor:
        return self._numbers(blocks) * self._stride

    def _mask(self, seen: torch.Tensor, pages: int, dtype: torch.dtype) -> torch.Tensor:
        """[n, rows of so many pages] 0 for as many rows as are seen, minus infinity behind them."""
        hidden = torch.arange(pages * self._page, device=self._device) >= seen[:, None]
        return torch.zeros(hidden.shape, dtype=dtype, device=self._device).masked_fill_(hidden, -torch.inf)


def _width(family: _Family) -> int:
    """The most pages that one of them has for itself."""
    return max(len(member.table) - shared for member, shared in zip(family.members, family.along, strict=True))


def _bucket(pages: int, step: int) -> int:
    """The smallest power of `step`, beginning with 4, that holds so many pages."""
    size = 4
    while size < pages:
        size *= step
    return size


def _kin(members: list[_Member]) -> list[_Family]:
    """Families of requests that each go a quarter of their way with others; half, where they may have nearer kin."""
    found: list[_Family] = []
    open_: list[list[_Member]] = [[member for member in members if len(member.table) > 1]]
    while open_:
        of = open_.pop()
        parts: dict[int, list[_Member]] = {}
        for member in of:
            parts.setdefault(member.table[0], []).append(member)
        for part in parts.values():
            if len(part) < 2:
                continue
            spine, along, astray = _spine(part)
            near = [m for m in part if (2 if m.begin in astray else 4) * along[m.begin] >= len(m.table) - 1]
            kept = [along[member.begin] for member in near]
            if sum(kept) - len(spine) >= _LEAST_SAVED:
                found.append(_Family(near, kept, spine))
            # Who went to the end has been judged, so that each round leaves fewer.
            judged = {member.begin for member in (*near, *(m for m in part if along[m.begin] == len(spine)))}
            open_.append([member for member in part if member.begin not in judged])
    return found


def _spine(members: list[_Member]) -> tuple[list[int], dict[int, int], set[int]]:
    """The blocks on the longest way that two or more go together, the most of them at each parting; how far each goes
    along; and who parts in company.

    What is in a block is its whole past too: who shares one shares all before it. The last block is never shared.
    """
    along: dict[int, int] = {}
    astray: set[int] = set()
    at = 0
    while True:
        least = min(len(member.table) for member in members) - 1
        at += bisect_left(range(at, least), True, key=lambda i: len({m.table[i] for m in members}) > 1)
        parts: dict[int, list[_Member]] = {}
        for member in members:
            along[member.begin] = at
            if len(member.table) - 1 > at:
                parts.setdefault(member.table[at], []).append(member)
        largest = max(parts.values(), key=len, default=[])
        if len(largest) < 2:
            return members[0].table[:at], along, astray
        astray.update(m.begin for part in parts.values() if part is not largest and len(part) > 1 for m in part)
        members = largest


def padded[T](items: Sequence[T], count: int) -> list[T]:
    """As many as `count`, the last one again and again."""
    return [*items, *[items[-1]] * (count - len(items))]


def whole_sequences(lengths: Sequence[int]) -> RaggedPlan:
    """The plan of sequences of these lengths, one after the other, each of which attends to itself alone."""
    return RaggedPlan([], [PrefillRow(begin, end) for begin, end in pairwise([0, *accumulate(lengths)])])
