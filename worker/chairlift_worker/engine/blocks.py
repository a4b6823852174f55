"""The KV pool's bookkeeping: which block belongs to whom, and which content is where.

Every block is in exactly one of three states:

    free      no table names it, its content means nothing; its id lies on the free stack
    cached    no table names it, but it has a hash: its content may be wanted again
    owned     reference count >= 1: that many tables (or borrowers) name it; it has a hash or not

A hash names the content of a whole, computed block. A block with a hash is never written to. States
change in `_take`, `_refer` and `_give_up`, and nowhere else; a recycled block loses its hash in `_take`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence as Seq

from chairlift_worker.engine.idle import IdleBlocks


class BlockPool:
    """Hands out blocks to owners (sequence ids) and keeps their block tables.

    Taking and giving back one block is O(1). Not thread-safe: it lives in the engine's thread.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        # A stack: the block given back last is the one most likely still in a CPU's caches.
        self._free = list(range(num_blocks - 1, -1, -1))
        self._idle = IdleBlocks(num_blocks)
        self._num_references = [0] * num_blocks
        self._tables: dict[str, list[int]] = {}
        self._borrowed: dict[str, int] = {}
        self._hashes: list[bytes | None] = [None] * num_blocks
        self._block_of: dict[bytes, int] = {}

    @property
    def num_free(self) -> int:
        """Blocks that hold nothing."""
        return len(self._free)

    @property
    def num_cached(self) -> int:
        """Blocks without an owner whose content may be wanted again."""
        return len(self._idle)

    @property
    def num_available(self) -> int:
        """Blocks that anybody may take: free ones first, then cached ones."""
        return len(self._free) + len(self._idle)

    @property
    def num_owned(self) -> int:
        """Blocks that somebody holds."""
        return self.num_blocks - self.num_available

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
        return self.num_missing(owner, num_tokens) <= self.num_available

    def grow(self, owner: str, num_tokens: int) -> None:
        """Give the owner room for `num_tokens` tokens in all; ask `can_grow` first."""
        num_missing = self.num_missing(owner, num_tokens)
        assert num_missing <= self.num_available, (owner, num_missing, self.num_available)
        table = self._tables.setdefault(owner, [])
        table.extend(self._take() for _ in range(num_missing))

    def match(self, hashes: Seq[bytes]) -> tuple[int, ...]:
        """The blocks that hold the longest known beginning of a chain of hashes."""
        blocks = []
        for name in hashes:
            block = self._block_of.get(name)
            if block is None:
                break
            blocks.append(block)
        return tuple(blocks)

    def num_idle(self, blocks: Seq[int]) -> int:
        """How many of them nobody holds: using those takes them from what is available."""
        return sum(not self._num_references[block] for block in blocks)

    def adopt(self, owner: str, blocks: Seq[int]) -> None:
        """Begin a new owner's table with whole blocks that hold its first tokens already.

        They come from `match`, or from the table of a sequence that begins alike.
        """
        assert owner not in self._tables, owner
        for block in blocks:
            self._refer(block)
        self._tables[owner] = list(blocks)

    def borrow(self, owner: str, block: int) -> None:
        """Keep a block that the owner's next step copies from; see `Chunk.copy_from`."""
        assert owner not in self._borrowed, owner
        self._refer(block)
        self._borrowed[owner] = block

    def borrowed(self, owner: str) -> int | None:
        """The block that the owner still has to copy from."""
        return self._borrowed.get(owner)

    def give_back(self, owner: str) -> None:
        """The copy is made. Harmless if there was none to make."""
        block = self._borrowed.pop(owner, None)
        if block is not None:
            self._give_up(block)

    def name(self, owner: str, index: int, content: bytes) -> None:
        """The owner's block at `index` is whole and computed: others may find it by its hash.

        Where two have computed the same, the first block keeps the name.
        """
        block = self._tables[owner][index]
        if self._hashes[block] is None and content not in self._block_of:
            self._hashes[block] = content
            self._block_of[content] = block
            self._idle.named(block, content)

    def forget(self, owner: str) -> None:
        """Take the names off all of the owner's blocks: what they hold must not be used again."""
        for block in self._tables.get(owner, ()):
            self._unname(block)

    def release(self, owner: str) -> None:
        """Drop the owner's table; what nobody else holds becomes cached or free. Harmless if it has none."""
        self.give_back(owner)
        for block in reversed(self._tables.pop(owner, ())):
            self._give_up(block)

    def check(self) -> None:
        """Prove the books: free + cached + owned == total, every count and every name is right."""
        mentions = Counter(block for table in self._tables.values() for block in table)
        mentions.update(self._borrowed.values())
        free, idle = set(self._free), set(self._idle)
        assert len(free) == len(self._free), "a block is free twice"
        assert free.isdisjoint(mentions), f"free and owned at once: {sorted(free & mentions.keys())}"
        assert free.isdisjoint(idle), f"free and cached at once: {sorted(free & idle)}"
        assert idle.isdisjoint(mentions), f"cached and owned at once: {sorted(idle & mentions.keys())}"
        num_owned = len(mentions)
        assert len(free) + len(idle) + num_owned == self.num_blocks, (len(free), len(idle), num_owned)
        for block, num_references in enumerate(self._num_references):
            assert num_references == mentions[block], (block, num_references, mentions[block])
        for owner, table in self._tables.items():
            assert len(set(table)) == len(table), f"{owner} names a block twice"
        named = {block: name for block, name in enumerate(self._hashes) if name is not None}
        assert self._block_of == {name: block for block, name in named.items()}
        assert free.isdisjoint(named), "a free block has kept its name"
        assert idle <= named.keys(), "a cached block without a name"

    def _take(self) -> int:
        if self._free:
            block = self._free.pop()
        else:
            block = self._idle.pop()
            self._unname(block)
        self._num_references[block] = 1
        return block

    def _refer(self, block: int) -> None:
        if self._num_references[block] == 0:
            self._idle.reuse(block)
        self._num_references[block] += 1

    def _give_up(self, block: int) -> None:
        self._num_references[block] -= 1
        if self._num_references[block] > 0:
            return
        if self._hashes[block] is None:
            self._free.append(block)
        else:
            self._idle.add(block)

    def _unname(self, block: int) -> None:
        content = self._hashes[block]
        if content is not None:
            self._hashes[block] = None
            del self._block_of[content]
