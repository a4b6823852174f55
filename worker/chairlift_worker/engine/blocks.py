"""The KV pool's bookkeeping: which block belongs to whom.

Every block is in exactly one of two states:

    free    no table names it; its id lies on the free stack
    owned   reference count >= 1: that many block tables name it

`_take` and `_give_up` are the only two places where a block changes state. A prefix cache adds a
third state, "cached" (no owner, but its content may be wanted again), and its hashes, in these two
places and nowhere else: `_take` is where a recycled block must forget its hash.
"""

from __future__ import annotations

from collections import Counter


class BlockPool:
    """Hands out blocks to owners (job ids) and keeps their block tables.

    Taking and giving back one block is O(1). Not thread-safe: it lives in the engine's thread.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        # A stack: the block given back last is the one most likely still in a CPU's caches.
        self._free = list(range(num_blocks - 1, -1, -1))
        self._num_references = [0] * num_blocks
        self._tables: dict[str, list[int]] = {}

    @property
    def num_free(self) -> int:
        """Blocks that anybody may take."""
        return len(self._free)

    @property
    def num_owned(self) -> int:
        """Blocks in at least one table."""
        return self.num_blocks - len(self._free)

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that `num_tokens` slots take."""
        return -(-num_tokens // self.block_size)

    def table(self, owner: str) -> tuple[int, ...]:
        """The owner's blocks in order of position; empty if it has none."""
        return tuple(self._tables.get(owner, ()))

    def num_slots(self, owner: str) -> int:
        """Tokens that the owner's blocks have room for."""
        return len(self._tables.get(owner, ())) * self.block_size

    def num_missing(self, owner: str, num_tokens: int) -> int:
        """Blocks to add before the owner has `num_tokens` slots."""
        return max(0, self.blocks_for(num_tokens) - len(self._tables.get(owner, ())))

    def can_grow(self, owner: str, num_tokens: int) -> bool:
        """Whether `grow` would succeed."""
        return self.num_missing(owner, num_tokens) <= len(self._free)

    def grow(self, owner: str, num_tokens: int) -> None:
        """Give the owner room for `num_tokens` tokens in all; ask `can_grow` first."""
        num_missing = self.num_missing(owner, num_tokens)
        assert num_missing <= len(self._free), (owner, num_missing, len(self._free))
        table = self._tables.setdefault(owner, [])
        table.extend(self._take() for _ in range(num_missing))

    def share(self, owner: str, source: str, num_tokens: int) -> None:
        """Begin the new owner's table with the source's blocks of its first `num_tokens` tokens.

        Only whole blocks can be shared, since both owners go on writing behind them.
        """
        assert owner not in self._tables, owner
        assert num_tokens % self.block_size == 0, (num_tokens, self.block_size)
        assert num_tokens <= self.num_slots(source), (num_tokens, self.num_slots(source))
        shared = self._tables[source][: num_tokens // self.block_size]
        for block in shared:
            self._num_references[block] += 1
        self._tables[owner] = shared

    def release(self, owner: str) -> None:
        """Forget the owner's table; blocks that nobody else names become free. Harmless if it has none."""
        for block in reversed(self._tables.pop(owner, ())):
            self._give_up(block)

    def check(self) -> None:
        """Prove the books: free + owned == total, and every reference count equals its tables' mentions."""
        mentions = Counter(block for table in self._tables.values() for block in table)
        free = set(self._free)
        assert len(free) == len(self._free), "a block is free twice"
        assert free.isdisjoint(mentions), f"free and owned at once: {sorted(free & mentions.keys())}"
        assert len(free) + len(mentions) == self.num_blocks, (len(free), len(mentions), self.num_blocks)
        for block, num_references in enumerate(self._num_references):
            assert num_references == mentions[block], (block, num_references, mentions[block])
        for owner, table in self._tables.items():
            assert len(set(table)) == len(table), f"{owner} names a block twice"

    def _take(self) -> int:
        block = self._free.pop()
        self._num_references[block] = 1
        return block

    def _give_up(self, block: int) -> None:
        self._num_references[block] -= 1
        if self._num_references[block] == 0:
            self._free.append(block)
