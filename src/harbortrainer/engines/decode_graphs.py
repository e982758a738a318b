"""Decoding by CUDA graphs: a forward pass that was captured once is played again on what lies in its memory.

A small model's pass takes as long as Python takes to name its operations, some dozens a layer; a graph is named once.

Contract: for passes over our own attention in which each request has one query; others are computed operation by
operation. A graph is of one size, one adapter and one way to draw, and what it computes is what the pass would have. It
reads its own memory, the cache and the weights, and no number that Python knew when it was captured. A model that waits
for such a number (which rows an expert gets, say), or whose capture fails, has none. For the engine's thread alone.
"""

import logging
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from harbortrainer.engines.batching_internals import PagedAttentionArgs
from harbortrainer.engines.ragged_plan import Asking, Planner, padded
from harbortrainer.engines.waiting_operations import Waits

COUNTS: tuple[int, ...] = (1, 4, 16, 64)
"""Requests of a graph. What is padded costs little: a pass of few tokens waits for the weights. None for no graphs."""
_LEAST_PAGES = 4
MOST_PAGES = 4096
"""Of all requests; the copy that a layer makes of them is 270 MB in Qwen3-8B."""
_log = logging.getLogger(__name__)


class Size(NamedTuple):
    """Requests of a graph, and pages of the cache that it reads of each."""

    requests: int
    pages: int


def size_of(asking: Sequence[Asking], page_size: int) -> Size | None:
    """What a pass is padded to; None where it has no graph, since it prefills, or is too large."""
    if any(one.queries > 1 for one in asking):
        return None
    longest = -(-max(one.keys for one in asking) // page_size)
    requests = next((count for count in COUNTS if count >= len(asking)), 0)
    pages = max(_LEAST_PAGES, 1 << (longest - 1).bit_length())
    return Size(requests, pages) if requests and requests * pages <= MOST_PAGES else None


class DecodeGraph:
    """The memory of one graph, and the graph once it is captured.

    Args:
        size: What it is padded to.
        like: Of a pass, for its shapes and device.
        unread: A row of the cache that nobody reads: there goes what padding computes.
    """

    def __init__(self, size: Size, like: PagedAttentionArgs, unread: int) -> None:
        count, device = size.requests, like["input_ids"].device
        zeros = partial(torch.zeros, dtype=torch.int32, device=device)
        self._size, self._unread = size, unread
        self._tokens, self._positions = zeros(1, count), zeros(1, count)
        self._draws = zeros(like["logits_processor_args"].shape[0], count)
        self._writes = zeros(count, dtype=torch.long)
        self._reads = zeros(count, size.pages + 1, dtype=torch.long)
        self._last = torch.arange(count, dtype=torch.int32, device=device)
        self.output = zeros(2, count)
        self.graph: torch.cuda.CUDAGraph | None = None

    def fill(self, batch: PagedAttentionArgs, asking: Sequence[Asking], page_size: int) -> None:
        """Lays a pass into the memory; what is beyond it reads what the last request reads, and writes nowhere."""
        count, pages = len(asking), self._size.pages
        self._tokens[:, :count].copy_(batch["input_ids"])
        self._positions[:, :count].copy_(batch["position_ids"])
        self._draws[:, :count].copy_(batch["logits_processor_args"])
        (writes,) = batch["write_index"]
        self._writes.fill_(self._unread)
        self._writes[:count].copy_(writes)
        rows = [[*padded(one.table[: -(-one.keys // page_size)], pages), one.keys] for one in asking]
        self._reads.copy_(torch.tensor(padded(rows, self._size.requests)))

    def batch(self, like: PagedAttentionArgs, planner: Planner) -> dict:
        """A pass that reads this memory alone."""
        return {
            **like,
            "input_ids": self._tokens,
            "position_ids": self._positions,
            "write_index": [self._writes],
            "logits_indices": self._last,
            "logits_processor_args": self._draws,
            "ragged_plan": planner.plan_of(self._reads),
        }


class DecodeGraphs:
    """The graphs of a sampler, captured when a pass of their kind comes.

    Args:
        planner: Of the cache.
        page_size: Rows of a page.
        unread: A row of the cache that nobody reads.
        stream: The engine's.
    """

    def __init__(self, planner: Planner, page_size: int, unread: int, stream: torch.cuda.Stream) -> None:
        self._planner, self._page_size, self._unread, self._stream = planner, page_size, unread, stream
        self._graphs: dict[Hashable, DecodeGraph] = {}
        self._pool = torch.cuda.graph_pool_handle()
        self.refused = ""
        """Why there are none, "" where there are."""
        self.played = 0

    def play(
        self,
        asking: Sequence[Asking],
        batch: PagedAttentionArgs,
        way: Hashable,
        forward: Callable[[dict, Tensor], None],
    ) -> Tensor | None:
        """Computes a pass, by its graph from the second of its kind on.

        Args:
            way: What else decides which operations it has.
            forward: Given a pass, puts what it samples into a tensor like this call's result.

        Returns:
            [2, n] tokens and log-probabilities as the engine keeps them; None where this pass has no graph.
        """
        size = None if self.refused else size_of(asking, self._page_size)
        if size is None:
            return None
        graph = self._graphs.get((size, way))
        if graph is None:
            graph = self._graphs[size, way] = DecodeGraph(size, batch, self._unread)
        graph.fill(batch, asking, self._page_size)
        if graph.graph is not None:
            graph.graph.replay()
            self.played += 1
        else:
            self._capture(graph, lambda: forward(graph.batch(batch, self._planner), graph.output))
        return graph.output[:, : len(asking)]

    def _capture(self, graph: DecodeGraph, compute: Callable[[], None]) -> None:
        """Computes the pass, and captures it: computing makes ready what must not be made within a capture."""
        with Waits() as waits:
            compute()
        if waits.named:
            self._refuse(f"the model waits for a number ({waits.named})")
            return
        captured = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(captured, self._pool, self._stream, capture_error_mode="thread_local"):
                compute()
        except RuntimeError as error:  # whatever it is of: the same is computed without
            self._refuse(str(error).splitlines()[0])
        else:
            graph.graph = captured

    def _refuse(self, why: str) -> None:
        self.refused = why
        self._graphs.clear()
        _log.warning("the sampler decodes without CUDA graphs: %s", why)
