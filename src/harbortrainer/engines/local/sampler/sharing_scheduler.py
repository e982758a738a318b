"""transformers' scheduler, extended for several policy versions and for requests with shared prefixes."""

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
from harbortrainer.engines.local.sampler.sampling_params import PolicyVersion

SHARING_SCHEDULER = "sharing"
_UNLIMITED = 1 << 62


def _serial(state: RequestState) -> int:
    return state.logit_processor_kwargs["policy"].serial


class SharingScheduler(FIFOScheduler):
    """transformers' scheduler for several policies and for shared prefixes.

    Policies: a forward pass serves one policy. While requests of an older policy run, the policies alternate. Only the
    newest policy uses the prefix cache; older ones neither read from it nor add to it.

    Prefixes: of several requests with the same prefix, one computes it and the others wait for it. Later requests reuse
    cached prompts and answers, which is transformers' own function. A nearly full cache evicts the least recently used
    blocks first, and the end of a request before its beginning.

    Invariant: the first waiting request is skipped only if a running request computes the blocks that it needs.
    """

    newest = active_policy = PolicyVersion()
    _hashes: Mapping[str, Sequence[int]] = {}
    reads_prefixes_once = False
    """Whether a pass reads a shared prefix once. A batch may then refer to more cache rows than the cache holds, which
    transformers' own bound would prevent."""

    def set_newest(self, policy: PolicyVersion) -> None:
        """Register the newest policy, and evict what the prefix cache holds for others. Call only while paused."""
        self.newest = policy
        for allocator in self.cache.cache_allocators.values():
            ledger = allocator.ledger
            self.cache.pool.free_blocks(allocator.index, list(ledger.cached_blocks))
            for index in (ledger.cached_blocks, ledger.hash_to_block, ledger.block_to_hash):
                index.clear()

    def schedule_batch(
        self, token_budget: int, cache_budget: int
    ) -> tuple[list[FutureRequestState] | None, bool, int, int]:
        by_policy = {_serial(s): s for s in (*self.active_requests.values(), *self.waiting_requests.values())}
        full, starved, cache_budget = False, [], _UNLIMITED if self.reads_prefixes_once else cache_budget
        for serial in sorted(by_policy, key=lambda serial: (serial <= self.active_policy.serial, serial)):
            self.active_policy = by_policy[serial].logit_processor_kwargs["policy"]
            scheduled = super().schedule_batch(token_budget, cache_budget)
            if scheduled[0]:
                if self.active_policy != self.newest:
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
        own = [state for state in candidates if _serial(state) == self.active_policy.serial]
        return super()._process_candidates(own, token_budget, cache_budget, request_ids_to_remove_from_waiting)

    def _infer_request_tokens(self, state: RequestState, request_ids_to_remove_from_waiting: set[str]) -> list[int]:
        if self.active_policy == self.newest or state.status == RequestStatus.DECODING:
            return super()._infer_request_tokens(state, request_ids_to_remove_from_waiting)
        return state.remaining_prefill_tokens

    def _get_waiting_candidates(self) -> list[RequestState]:
        waiting = [state for state in super()._get_waiting_candidates() if _serial(state) == self.active_policy.serial]
        if not waiting or not self.cache.use_prefix_sharing or self.active_policy != self.newest:
            return waiting
        running = [state for state in self.active_requests.values() if _serial(state) == self.active_policy.serial]
        prefilling = [state for state in running if state.status == RequestStatus.PREFILLING]
        self._hashes = {state.request_id: self._block_hashes(state) for state in (*prefilling, *waiting)}
        in_progress = {block for state in prefilling for block in self._uncached(state)}
        admitted: list[RequestState] = []
        for state in waiting:
            uncached = self._uncached(state)
            if not uncached or uncached[0] not in in_progress:
                in_progress.update(uncached)
                admitted.append(state)
        return admitted

    def _block_hashes(self, state: RequestState) -> Sequence[int]:
        """Return the cache's hashes of the prompt's full blocks; each hash covers all blocks before it too.

        The last token is always computed, so no request waits for the block that it completes.
        """
        size = self.allocator.tokens_per_page
        count = (len(state.initial_tokens) - 1) // size
        cached = self._hashes.get(state.request_id, ())
        if len(cached) == count:
            return cached
        hashes: list[int] = []
        for begin in range(0, count * size, size):
            tokens = state.initial_tokens[begin : begin + size]
            hashes.append(compute_block_hash(hashes[-1] if hashes else None, tokens))
        return hashes

    def _uncached(self, state: RequestState) -> Sequence[int]:
        """Return the prompt's block hashes, starting with the first one that is not in the cache."""
        hashes, cached = self._hashes[state.request_id], self.allocator.ledger.hash_to_block
        return hashes[next((i for i, block in enumerate(hashes) if block not in cached), len(hashes)) :]

    def finish_request(self, request_id: str) -> None:
        state = self.active_requests.get(request_id)
        if self.cache.use_prefix_sharing and state is not None:
            self._cache_blocks(state)
        super().finish_request(request_id)

    def _cache_blocks(self, state: RequestState) -> None:
        """Add a finished request's full blocks to the prefix cache.

        transformers omits the blocks that the request's last forward pass completed. The table is reversed so that the
        end of the request is evicted first.
        """
        allocator = self.allocator
        table = allocator.block_table.get(state.request_id, [])  # empty if the request was preempted
        if table and state.status == RequestStatus.FINISHED and _serial(state) == self.newest.serial:
            full = table[: state.position_offset // allocator.tokens_per_page]
            new = sum(block not in allocator.ledger.block_to_hash for block in full)
            allocator.mark_complete_blocks(state.request_id, state.initial_tokens + state.generated_tokens, new)
        table.reverse()

    def _try_to_meet_safety_margin(self) -> bool:
        if self.cache.use_prefix_sharing:
            self._evict_blocks()
        return super()._try_to_meet_safety_margin()

    def _evict_blocks(self) -> None:
        """Evict as many unused blocks as the next batch and the library's safety margin may need."""
        allocator, ledger, pool = self.allocator, self.allocator.ledger, self.cache.pool
        states = [*self.active_requests.values(), *self.waiting_requests.values()]
        tokens = min(sum(len(state.remaining_prefill_tokens) for state in states), self.cache.max_batch_tokens)
        # A request's new tokens may not be aligned to blocks: two partial blocks each.
        needed = tokens // allocator.tokens_per_page + 2 * min(len(states), self.max_requests_per_batch)
        needed = max(needed, ceil(self.safety_margin * allocator.num_blocks) + 1)
        free = pool.count_free_blocks(allocator.index) + pool.num_free_sectors * allocator.blocks_per_sector
        oldest = list(islice(ledger.cached_blocks, max(0, needed - free)))
        for block in oldest:
            del ledger.cached_blocks[block]
            del ledger.hash_to_block[ledger.block_to_hash.pop(block)]
        pool.free_blocks(allocator.index, oldest)
        pool.try_to_free_sectors()

    @property
    def allocator(self) -> FullAttentionCacheAllocator:
        """The cache's only allocator: prefix sharing exists for full attention only."""
        (allocator,) = self.cache.cache_allocators.values()
        return cast("FullAttentionCacheAllocator", allocator)


cast("dict[str, type]", SCHEDULER_MAPPING)[SHARING_SCHEDULER] = SharingScheduler
