"""Blocks that nobody owns but whose content may be wanted again, and which of them goes first.

The one with the least hit density goes: hits that are still to be expected, for the room and time they
take (after Beckmann, Chen, Cidon: LHD, NSDI 2018). Blocks are of two kinds, those that were used again
before and those that were not; for each kind, hits and misses are counted by age. Where a pool is so
small that most blocks would go shortly before they are wanted, this keeps some for long rather than all
for a short time; in a large one it comes close to least recently used, which it is until it has learnt.

A sequence gives its blocks back from the end, so that among its own the later ones go first: a block is
of no use once one before it is gone.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from math import log2

_FRESH, _REUSED = 0, 1
_NUM_AGES = 28
_NUM_TO_LEARN = 1000
_DECAY = 0.95
_GHOSTS_PER_BLOCK = 4
_MAX_GHOSTS = 200_000


class IdleBlocks:
    """Time is counted in blocks given back, so that ages compare with the size of the pool."""

    def __init__(self, num_blocks: int) -> None:
        self._queues: tuple[OrderedDict[int, int], ...] = (OrderedDict(), OrderedDict())
        self._kinds = [_FRESH] * num_blocks
        self._contents: list[bytes] = [b""] * num_blocks
        # What was evicted, and when it was given back: wanted again, it would have been a hit.
        self._ghosts: OrderedDict[bytes, tuple[int, int]] = OrderedDict()
        self._max_ghosts = min(_MAX_GHOSTS, _GHOSTS_PER_BLOCK * num_blocks)
        self._densities = HitDensities(num_blocks)
        self._now = 0

    def __len__(self) -> int:
        return sum(map(len, self._queues))

    def __iter__(self) -> Iterator[int]:
        for queue in self._queues:
            yield from queue

    def named(self, block: int, content: bytes) -> None:
        """A block that somebody owns has been computed, perhaps not for the first time."""
        ghost = self._ghosts.pop(content, None)
        self._kinds[block] = _FRESH if ghost is None else _REUSED
        self._contents[block] = content
        if ghost is not None:
            kind, since = ghost
            self._densities.count(kind, self._now - since, is_hit=True)

    def add(self, block: int) -> None:
        """Its last owner has left it."""
        self._now += 1
        self._queues[self._kinds[block]][block] = self._now

    def reuse(self, block: int) -> None:
        """It has an owner again."""
        kind = self._kinds[block]
        since = self._queues[kind].pop(block)
        self._densities.count(kind, self._now - since, is_hit=True)
        self._kinds[block] = _REUSED

    def pop(self) -> int:
        """Take out the block whose room can be put to better use."""
        kind = min((kind for kind in (_FRESH, _REUSED) if self._queues[kind]), key=self._first_density)
        block, since = self._queues[kind].popitem(last=False)
        self._haunt(kind, self._contents[block], since)
        return block

    def _first_density(self, kind: int) -> float:
        """Of the oldest of its kind; the order within a kind is that in which they were given back."""
        return self._densities.of(kind, self._now - next(iter(self._queues[kind].values())))

    def _haunt(self, kind: int, content: bytes, since: int) -> None:
        self._ghosts[content] = kind, since
        if len(self._ghosts) > self._max_ghosts:
            _, (kind, since) = self._ghosts.popitem(last=False)
            self._densities.count(kind, self._now - since, is_hit=False)


class HitDensities:
    """Hits to be expected per block and time, by kind and age, from those that were."""

    def __init__(self, num_blocks: int) -> None:
        self._unit = max(1, num_blocks // 64)
        self._hits = [[0.0] * _NUM_AGES for _ in (_FRESH, _REUSED)]
        self._ends = [[0.0] * _NUM_AGES for _ in (_FRESH, _REUSED)]
        self._densities: list[list[float]] = []
        self._num_counted = 0

    def of(self, kind: int, age: int) -> float:
        """The density of a block of this age; the older, the less, until enough is known."""
        return self._densities[kind][self._step(age)] if self._densities else 1 / (age + 1)

    def count(self, kind: int, age: int, *, is_hit: bool) -> None:
        """A block was wanted again at this age, or has not been until it was given up at this age."""
        step = self._step(age)
        self._ends[kind][step] += 1
        if is_hit:
            self._hits[kind][step] += 1
        self._num_counted += 1
        if self._num_counted % _NUM_TO_LEARN == 0:
            self._densities = [self._learn(kind) for kind in (_FRESH, _REUSED)]

    def _step(self, age: int) -> int:
        return min(_NUM_AGES - 1, int(2 * log2(age / self._unit + 1)))

    def _middle(self, step: int) -> float:
        return self._unit * (2 ** ((step + 0.5) / 2) - 1)

    def _learn(self, kind: int) -> list[float]:
        """From the highest age down: hits above an age, over the time that blocks live beyond it."""
        hits, ends = self._hits[kind], self._ends[kind]
        densities = [0.0] * _NUM_AGES
        num_hits = num_alive = lifetime = 0.0
        for step in range(_NUM_AGES - 1, -1, -1):
            if step + 1 < _NUM_AGES:
                lifetime += num_alive * (self._middle(step + 1) - self._middle(step))
            width = self._middle(step) - (self._middle(step - 1) if step else 0.0)
            num_hits += hits[step]
            num_alive += ends[step]
            densities[step] = (num_hits + 1e-3) / (lifetime + ends[step] * width / 2 + 4 * self._unit)
            hits[step] *= _DECAY
            ends[step] *= _DECAY
        return densities
