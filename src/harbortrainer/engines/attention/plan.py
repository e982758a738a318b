"""Plans a forward pass over a paged cache for requests of different lengths: from block tables to batches.

Each request attends to its own keys only (`attention.paged`). Requests with few queries, including all that decode, are
padded to a few common shapes. Requests with many queries (prefills) are computed one by one. On a CPU, pages of a
prefix that several requests share, as the trials of a group do, are read once.

Contract: for full causal attention only; one plan serves every layer of a forward pass.
"""

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

_MAX_SHORT_QUERIES = 16  # a request with more queries is a prefill, computed by itself
_MIN_SAVED_PAGES = 4  # below it a prefix group costs more than it saves
_CPU = torch.device("cpu")


class Query(NamedTuple):
    """One request in a forward pass.

    Attributes:
        queries: Number of its tokens in the flat batch, at least one.
        keys: Number of all its tokens so far, including these queries.
        table: Its blocks in the cache, filled in order, each from its first row. There may be more than needed.
    """

    queries: int
    keys: int
    table: Sequence[int]


@dataclass(frozen=True, slots=True)
class Batch:
    """Prefix groups of short requests, padded to a common shape: P groups of R requests, each with Q queries, W pages.

    Padding repeats existing entries, so it only computes the same values again. Each query has E rows in a mask, one
    for each query head of a key/value head.

    Attributes:
        size: P, R, Q.
        rows: [P * R * Q] positions of the queries in the flat batch.
        own_pages: [P * R * W] pages with a request's keys after the shared prefix.
        own_mask: [P * R, 1, Q * E, W * page size] 0 for visible keys, minus infinity elsewhere; 1 in place of Q * E if
            Q is 1.
        visible: [P * R, 1] rows of its own pages that a request with one query sees.
        prefix_pages: [P * S] pages shared by two or more requests of a group; None if every group is one request.
        prefix_mask: [P, 1, R * Q * E, S * page size] like `own_mask`, for the shared pages; None if every request
            shares the whole prefix.
    """

    size: tuple[int, int, int]
    rows: torch.Tensor
    own_pages: torch.Tensor
    own_mask: torch.Tensor
    visible: torch.Tensor
    prefix_pages: torch.Tensor | None = None
    prefix_mask: torch.Tensor | None = None

    def advance(self) -> None:
        """Make one more key visible to each request, within its present pages."""
        self.own_mask.flatten(1).scatter_(1, self.visible, 0.0)
        self.visible.add_(1)


@dataclass(frozen=True, slots=True)
class PrefillRow:
    """One request with many queries, in the flat batch from `begin` to `end`.

    Attributes:
        pages: The pages with its keys; None without earlier tokens: then the batch's own keys are used.
        mask: [Q, K] 0 for visible keys, minus infinity elsewhere; None without earlier tokens (plain causal).
    """

    begin: int
    end: int
    pages: torch.Tensor | None = None
    mask: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class RaggedPlan:
    """The reads of one forward pass, the same in every layer."""

    batches: Sequence[Batch]
    prefills: Sequence[PrefillRow]


class _ShortRequest(NamedTuple):
    """A request with few queries, which start at `begin` in the flat batch; `table` ends with the last key's block."""

    begin: int
    queries: int
    keys: int
    table: list[int]


class _PrefixGroup(NamedTuple):
    """Requests that share a prefix: how many of its pages each one shares, and the prefix's blocks."""

    requests: list[_ShortRequest]
    shared: list[int]
    prefix: list[int]


class Planner:
    """Plans the forward passes over one cache. While requests only decode within their pages, a plan is updated.

    Args:
        page_size: Rows in a page.
        stride: Pages in a block, over all layers.
        heads_per_kv: Query heads for each key/value head.
        device, dtype: The cache's.
    """

    def __init__(
        self,
        page_size: int,
        stride: int,
        heads_per_kv: int,
        device: torch.device = _CPU,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self._page, self._stride, self._heads_per_kv = page_size, stride, heads_per_kv
        self._device, self._dtype = device, dtype
        self._decoding: list[_ShortRequest] = []
        self._plan = RaggedPlan([], [])
        self.reads_prefixes_once = device.type == "cpu"
        """Whether a shared prefix is read once instead of once per request."""

    def plan(self, requests: Iterable[Query]) -> RaggedPlan:
        """Plan a forward pass of these requests, in batch order. The plan is valid until the next call."""
        short: list[_ShortRequest] = []
        prefills: list[PrefillRow] = []
        begin = 0
        for queries, keys, table in requests:
            used = table[: -(-keys // self._page)]
            if queries <= _MAX_SHORT_QUERIES:
                short.append(_ShortRequest(begin, queries, keys, list(used)))
            else:
                prefills.append(self._prefill_row(begin, Query(queries, keys, used)))
            begin += queries
        decoding = short if begin == len(short) else []
        if decoding and decoding == [request._replace(keys=request.keys + 1) for request in self._decoding]:
            for batch in self._plan.batches:
                batch.advance()
        else:
            by_queries = [r for r in short if r.queries == 1], [r for r in short if r.queries > 1]
            self._plan = RaggedPlan([batch for part in by_queries for batch in self._make_batches(part)], prefills)
        self._decoding = decoding
        return self._plan

    def _make_batches(self, requests: list[_ShortRequest]) -> list[Batch]:
        """Batch groups of similar size together."""
        groups = _group_by_prefix(requests) if self.reads_prefixes_once else []
        grouped = {request.begin for group in groups for request in group.requests}
        by_size: dict[tuple[int, int], list[_PrefixGroup]] = {}
        for group in groups:
            by_size.setdefault((_bucket(len(group.prefix), 4), _bucket(_max_own_pages(group), 4)), []).append(group)
        for request in requests:
            if request.begin not in grouped:
                by_size.setdefault((0, _bucket(len(request.table), 2)), []).append(_PrefixGroup([request], [0], []))
        return [self._make_batch(similar) for similar in by_size.values()]

    def _make_batch(self, groups: list[_PrefixGroup]) -> Batch:
        largest = max(len(group.requests) for group in groups)
        queries = max(request.queries for group in groups for request in group.requests)
        width = max(map(_max_own_pages, groups))
        rows, own, visible, prefixes, shared = [], [], [], [], []
        for group in groups:
            prefixes.append(group.prefix)
            shared += _pad(group.shared, largest)
            for request, pages in zip(_pad(group.requests, largest), _pad(group.shared, largest), strict=True):
                rows += _pad(range(request.begin, request.begin + request.queries), queries)
                own += _pad(request.table[pages:], width)
                # The last query sees all rows of its own pages that have keys; each earlier query sees one row less.
                last = request.keys - pages * self._page
                visible += _pad(range(last - request.queries + 1, last + 1), queries)
        size, seen = (len(groups), largest, queries), self._tensor(visible)
        mask = self._mask(seen, width, torch.float32 if shared[0] else self._dtype).view(
            -1, 1, queries, width * self._page
        )
        if queries > 1:
            mask = mask.repeat_interleave(self._heads_per_kv, dim=2)
        batch = Batch(size, self._tensor(rows), self._pages(own), mask, seen[::queries, None].clone())
        return self._with_prefixes(batch, prefixes, shared) if shared[0] else batch

    def _with_prefixes(self, batch: Batch, prefixes: list[list[int]], shared: list[int]) -> Batch:
        longest, (groups, _, queries) = max(map(len, prefixes)), batch.size
        blocks = [block for prefix in prefixes for block in _pad(prefix, longest)]
        batch = replace(batch, prefix_pages=self._pages(blocks))
        if min(shared) == longest:
            return batch
        rows = self._tensor(shared).repeat_interleave(queries * self._heads_per_kv) * self._page
        mask = self._mask(rows, longest, torch.float32).view(groups, 1, -1, longest * self._page)
        return replace(batch, prefix_mask=mask)

    def _prefill_row(self, begin: int, request: Query) -> PrefillRow:
        queries, keys, table = request
        if keys == queries:
            return PrefillRow(begin, begin + queries)
        mask = torch.full((queries, keys), -torch.inf, dtype=self._dtype, device=self._device).triu_(keys - queries + 1)
        return PrefillRow(begin, begin + queries, self._pages(table), mask)

    def _tensor(self, numbers: Sequence[int]) -> torch.Tensor:
        return torch.tensor(numbers, device=self._device)

    def _pages(self, blocks: Sequence[int]) -> torch.Tensor:
        return self._tensor(blocks) * self._stride

    def _mask(self, visible: torch.Tensor, pages: int, dtype: torch.dtype) -> torch.Tensor:
        """Return [n, rows of this many pages]: 0 for the first `visible` [n] rows, minus infinity behind them."""
        hidden = torch.arange(pages * self._page, device=self._device) >= visible[:, None]
        return torch.zeros(hidden.shape, dtype=dtype, device=self._device).masked_fill_(hidden, -torch.inf)


def _max_own_pages(group: _PrefixGroup) -> int:
    """Return the largest number of unshared pages of a request in the group."""
    return max(len(request.table) - shared for request, shared in zip(group.requests, group.shared, strict=True))


def _bucket(pages: int, step: int) -> int:
    """Return the smallest of 4, 4 * step, 4 * step^2, ... that is at least `pages`."""
    size = 4
    while size < pages:
        size *= step
    return size


def _group_by_prefix(requests: list[_ShortRequest]) -> list[_PrefixGroup]:
    """Group requests by shared prefixes.

    A request joins a group if it shares at least a quarter of its pages with the prefix. If it diverged together with
    other requests, it needs half of them: it may fit better into a group with those.
    """
    groups: list[_PrefixGroup] = []
    pending: list[list[_ShortRequest]] = [[request for request in requests if len(request.table) > 1]]
    while pending:
        by_first_block: dict[int, list[_ShortRequest]] = {}
        for request in pending.pop():
            by_first_block.setdefault(request.table[0], []).append(request)
        for candidates in by_first_block.values():
            if len(candidates) < 2:
                continue
            prefix, shared, diverged = _longest_shared_prefix(candidates)
            near = [r for r in candidates if (2 if r.begin in diverged else 4) * shared[r.begin] >= len(r.table) - 1]
            pages = [shared[request.begin] for request in near]
            if sum(pages) - len(prefix) >= _MIN_SAVED_PAGES:
                groups.append(_PrefixGroup(near, pages, prefix))
            # Requests that share the whole prefix are not tried again, so that the rest shrinks each time.
            done = {r.begin for r in (*near, *(r for r in candidates if shared[r.begin] == len(prefix)))}
            pending.append([request for request in candidates if request.begin not in done])
    return groups


def _longest_shared_prefix(requests: list[_ShortRequest]) -> tuple[list[int], dict[int, int], set[int]]:
    """Return the longest prefix of blocks that two or more requests share.

    Where requests diverge, the largest subset is followed. A block's identity covers all tokens before it, so requests
    that share a block share everything before it. A request's last block is never shared.

    Returns:
        The prefix's blocks; by `begin`, how many of them each request shares; and the `begin` of those requests that
        diverged together with others.
    """
    shared: dict[int, int] = {}
    diverged: set[int] = set()
    at = 0
    while True:
        shortest = min(len(request.table) for request in requests) - 1
        at += bisect_left(range(at, shortest), True, key=lambda i: len({r.table[i] for r in requests}) > 1)
        by_block: dict[int, list[_ShortRequest]] = {}
        for request in requests:
            shared[request.begin] = at
            if len(request.table) - 1 > at:
                by_block.setdefault(request.table[at], []).append(request)
        largest = max(by_block.values(), key=len, default=[])
        if len(largest) < 2:
            return requests[0].table[:at], shared, diverged
        diverged.update(r.begin for part in by_block.values() if part is not largest and len(part) > 1 for r in part)
        requests = largest


def _pad[T](items: Sequence[T], count: int) -> list[T]:
    """Return `count` items, by repeating the last one."""
    return [*items, *[items[-1]] * (count - len(items))]
