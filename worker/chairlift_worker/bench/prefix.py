"""How often the prefix cache hits, on a trace, against the best that a pool of the size could do.

The engine's own block pool is driven, one request after the other. The best is found with the whole trace
at hand: of all blocks, the one goes whose next use is farthest away (Belady, IBM Systems Journal 1966).
"""

from __future__ import annotations

import heapq
from collections import ChainMap, OrderedDict
from collections.abc import Container
from collections.abc import Sequence as Seq

from chairlift_worker.engine.blocks import BlockPool

Requests = Seq[Seq[int]]
_NEVER = 1 << 60


def hit_rate(requests: Requests, num_blocks: int) -> float:
    """Part of all blocks that the engine's cache has when they are asked for."""
    pool = BlockPool(num_blocks, block_size=1)
    num_hits = 0
    for number, request in enumerate(requests):
        names = [block.to_bytes(8, "little") for block in request]
        found = pool.match(names)
        num_hits += len(found)
        if len(request) > num_blocks:
            continue
        owner = str(number)
        pool.adopt(owner, found)
        pool.grow(owner, len(request))
        for index in range(len(found), len(request)):
            pool.name(owner, index, names[index])
        pool.release(owner)
    return num_hits / _num_asked(requests)


def best_hit_rate(requests: Requests, num_blocks: int) -> float:
    """The same with foresight: whatever is needed again soonest stays."""
    cached: dict[int, int] = {}
    farthest: list[tuple[int, int, int]] = []
    num_hits = 0
    for request, next_uses in zip(requests, _next_uses(requests), strict=True):
        num_hits += _num_leading(request, cached)
        for index, (block, next_use) in enumerate(zip(request, next_uses, strict=True)):
            cached[block] = next_use
            heapq.heappush(farthest, (-next_use, -index, block))
        while len(cached) > num_blocks:
            next_use, _, block = heapq.heappop(farthest)
            if cached.get(block) == -next_use:
                del cached[block]
    return num_hits / _num_asked(requests)


def recency_hit_rate(requests: Requests, num_blocks: int, *, is_told: bool = False) -> float:
    """Least recently used; where it is told what is never asked for again, that goes first."""
    wanted: OrderedDict[int, None] = OrderedDict()
    useless: OrderedDict[int, None] = OrderedDict()
    num_hits = 0
    for request, next_uses in zip(requests, _next_uses(requests), strict=True):
        num_hits += _num_leading(request, ChainMap(wanted, useless))
        for block, next_use in zip(reversed(request), reversed(next_uses), strict=True):
            wanted.pop(block, None)
            useless.pop(block, None)
            (useless if is_told and next_use == _NEVER else wanted)[block] = None
        while len(wanted) + len(useless) > num_blocks:
            (useless or wanted).popitem(last=False)
    return num_hits / _num_asked(requests)


def unlimited_hit_rate(requests: Requests) -> float:
    """With room for everything."""
    return 1 - len({block for request in requests for block in request}) / _num_asked(requests)


def compare(requests: Requests, num_blocks: int) -> dict[str, float]:
    """One cell of the bench."""
    ours, best = hit_rate(requests, num_blocks), best_hit_rate(requests, num_blocks)
    return {
        "hit rate": ours,
        "least recently used": recency_hit_rate(requests, num_blocks),
        "best possible": best,
        "part of the best": ours / best,
        "told what ends": recency_hit_rate(requests, num_blocks, is_told=True),
    }


def _num_asked(requests: Requests) -> int:
    return sum(map(len, requests))


def _num_leading(request: Seq[int], cached: Container[int]) -> int:
    """Blocks at the beginning of the request that are all there."""
    count = 0
    for block in request:
        if block not in cached:
            break
        count += 1
    return count


def _next_uses(requests: Requests) -> list[list[int]]:
    """For each block of each request, the next request that asks for it."""
    latest: dict[int, int] = {}
    uses: list[list[int]] = []
    for number in range(len(requests) - 1, -1, -1):
        uses.append([latest.get(block, _NEVER) for block in requests[number]])
        latest.update((block, number) for block in requests[number])
    return uses[::-1]
