"""Which of the requests that wait begin: transformers' scheduler, bent to several policies and to shared beginnings."""

from collections.abc import Mapping, Sequence
from itertools import islice
from math import ceil
from typing import cast

from harbortrainer.engines.batching_internals import (
    SCHEDULER_MAPPING,
    FIFOScheduler,
    FullAttentionCacheAllocator,
    FutureRequestState,
    RequestState,
    RequestStatus,
    compute_block_hash,
)
from harbortrainer.engines.local.sampler.draw import Policy

SHARING_SCHEDULER = "sharing"
_BOUNDLESS = 1 << 62


def _serial(state: RequestState) -> int:
    return state.logit_processor_kwargs["policy"].serial


class SharingScheduler(FIFOScheduler):
    """transformers' scheduler for several policies, and for requests that begin alike.

    A forward pass is one policy's: while requests of an older one run, the policies take turns. What the cache knows by
    its content is the newest policy's alone; those before it neither look there nor leave anything.

    Of requests that begin alike one computes the beginning, the others wait and take it. Who comes later finds in the
    cache what was computed before, be it prompt or answer: that is transformers' own. A cache that is nearly full is
    not emptied at once: what was used longest ago goes first, and of one request its end before its beginning.

    Invariant: the first that waits is never left out unless a running request computes what it waits for.
    """

    newest = turn = Policy()
    _hashes: Mapping[str, Sequence[int]] = {}
    reads_once = False
    """Whether a pass reads once what several requests share. Then it may have more requests than the cache could hold
    one by one, which is transformers' bound."""

    def begin(self, policy: Policy) -> None:
        """Makes a policy the newest, and forgets what the cache holds for others. Only while paused."""
        self.newest = policy
        for kind in self.cache.cache_allocators.values():
            self.cache.pool.free_blocks(kind.index, list(kind.ledger.cached_blocks))
            for known in (kind.ledger.cached_blocks, kind.ledger.hash_to_block, kind.ledger.block_to_hash):
                known.clear()

    def schedule_batch(
        self, token_budget: int, cache_budget: int
    ) -> tuple[list[FutureRequestState] | None, bool, int, int]:
        there = {_serial(s): s for s in (*self.active_requests.values(), *self.waiting_requests.values())}
        full, starved, cache_budget = False, [], _BOUNDLESS if self.reads_once else cache_budget
        for serial in sorted(there, key=lambda serial: (serial <= self.turn.serial, serial)):
            self.turn = there[serial].logit_processor_kwargs["policy"]
            scheduled = super().schedule_batch(token_budget, cache_budget)
            if scheduled[0]:
                if self.turn != self.newest:
                    for request in scheduled[0]:
                        request.complete_blocks = {}
                return scheduled
            full, starved = full or scheduled[0] is None, starved + self.starved_requests
        self.starved_requests = starved
        return None if full else [], False, 0, 0

    def _process_candidates(
        self,
        candidates: list[RequestState],
        token_budget: int,
        cache_budget: int,
        request_ids_to_remove_from_waiting: set[str],
    ) -> tuple[list[FutureRequestState], bool, bool, int, int]:
        own = [state for state in candidates if _serial(state) == self.turn.serial]
        return super()._process_candidates(own, token_budget, cache_budget, request_ids_to_remove_from_waiting)

    def _infer_request_tokens(self, state: RequestState, request_ids_to_remove_from_waiting: set[str]) -> list[int]:
        if self.turn == self.newest or state.status == RequestStatus.DECODING:
            return super()._infer_request_tokens(state, request_ids_to_remove_from_waiting)
        return state.remaining_prefill_tokens

    def _get_waiting_candidates(self) -> list[RequestState]:
        waiting = [state for state in super()._get_waiting_candidates() if _serial(state) == self.turn.serial]
        if not waiting or not self.cache.use_prefix_sharing or self.turn != self.newest:
            return waiting
        active = [state for state in self.active_requests.values() if _serial(state) == self.turn.serial]
        prefilling = [state for state in active if state.status == RequestStatus.PREFILLING]
        self._hashes = {state.request_id: self._blocks(state) for state in (*prefilling, *waiting)}
        under_way = {block for state in prefilling for block in self._missing(state)}
        admitted: list[RequestState] = []
        for state in waiting:
            missing = self._missing(state)
            if not missing or missing[0] not in under_way:
                under_way.update(missing)
                admitted.append(state)
        return admitted

    def _blocks(self, state: RequestState) -> Sequence[int]:
        """What the cache calls the prompt's whole blocks, each name standing for all that goes before it too.

        The last token is always computed, so that the block that it ends is nobody's to wait for.
        """
        size = self.allocator.tokens_per_page
        count = (len(state.initial_tokens) - 1) // size
        known = self._hashes.get(state.request_id, ())
        if len(known) == count:
            return known
        hashes: list[int] = []
        for begin in range(0, count * size, size):
            tokens = state.initial_tokens[begin : begin + size]
            hashes.append(compute_block_hash(hashes[-1] if hashes else None, tokens))
        return hashes

    def _missing(self, state: RequestState) -> Sequence[int]:
        """The blocks of a prompt from the first one on that is not in the cache."""
        hashes, there = self._hashes[state.request_id], self.allocator.ledger.hash_to_block
        return hashes[next((i for i, block in enumerate(hashes) if block not in there), len(hashes)) :]

    def finish_request(self, request_id: str) -> None:
        state = self.active_requests.get(request_id)
        if self.cache.use_prefix_sharing and state is not None:
            self._keep(state)
        super().finish_request(request_id)

    def _keep(self, state: RequestState) -> None:
        """Leaves what was computed to others, also by the last forward pass, which transformers passes over."""
        kind = self.allocator
        table = kind.block_table.get(state.request_id, [])  # none when the request was put off
        if table and state.status == RequestStatus.FINISHED and _serial(state) == self.newest.serial:
            whole = table[: state.position_offset // kind.tokens_per_page]
            new = sum(block not in kind.ledger.block_to_hash for block in whole)
            kind.mark_complete_blocks(state.request_id, state.initial_tokens + state.generated_tokens, new)
        table.reverse()

    def _try_to_meet_safety_margin(self) -> bool:
        if self.cache.use_prefix_sharing:
            self._make_room()
        return super()._try_to_meet_safety_margin()

    def _make_room(self) -> None:
        """Gives up as much of what no request uses as the next batch may need, and the library's margin."""
        kind, pool = self.allocator, self.cache.pool
        states = [*self.active_requests.values(), *self.waiting_requests.values()]
        tokens = min(sum(len(state.remaining_prefill_tokens) for state in states), self.cache.max_batch_tokens)
        # Of each request a block may be begun, and another one ended.
        needed = tokens // kind.tokens_per_page + 2 * min(len(states), self.max_requests_per_batch)
        needed = max(needed, ceil(self.safety_margin * kind.num_blocks) + 1)
        free = pool.count_free_blocks(kind.index) + pool.num_free_sectors * kind.blocks_per_sector
        oldest = list(islice(kind.ledger.cached_blocks, max(0, needed - free)))
        for block in oldest:
            del kind.ledger.cached_blocks[block]
            del kind.ledger.hash_to_block[kind.ledger.block_to_hash.pop(block)]
        pool.free_blocks(kind.index, oldest)
        pool.try_to_free_sectors()

    @property
    def allocator(self) -> FullAttentionCacheAllocator:
        """The one there is: only full attention shares."""
        (allocator,) = self.cache.cache_allocators.values()
        return cast("FullAttentionCacheAllocator", allocator)


cast("dict[str, type]", SCHEDULER_MAPPING)[SHARING_SCHEDULER] = SharingScheduler
