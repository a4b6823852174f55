"""What of a sequence is computed already when it boards: in the prefix cache, or in a sequence beside it."""

from __future__ import annotations

from typing import NamedTuple

from chairlift_worker.engine.blocks import BlockPool
from chairlift_worker.engine.sequence import Sequence


class Reuse(NamedTuple):
    """`blocks` hold the first tokens; `num_tokens` counts those of `copy_from` too."""

    blocks: tuple[int, ...]
    num_tokens: int
    copy_from: int | None = None
    """The block in the middle of which the sequence goes on: it gets a copy of its own."""

    def without_copy(self, block_size: int) -> Reuse:
        """The whole blocks alone."""
        return Reuse(self.blocks, len(self.blocks) * block_size)

    def before(self, position: int, block_size: int) -> Reuse:
        """The whole blocks alone that end at or before `position`."""
        num_blocks = min(len(self.blocks), position // block_size)
        return Reuse(self.blocks[:num_blocks], num_blocks * block_size)


def find_reuse(pool: BlockPool, sequence: Sequence) -> Reuse:
    """The longest beginning there is. The last token is always computed: it is what yields the next one."""
    limit = len(sequence.token_ids) - 1
    if sequence.logits_from is not None:
        limit = min(limit, sequence.logits_from)
    cached, shared = _cached(pool, sequence, limit), _shared(pool, sequence, limit)
    return shared if shared.num_tokens > cached.num_tokens else cached


def num_blocks_taken(pool: BlockPool, sequence: Sequence, reuse: Reuse) -> int:
    """Blocks that boarding takes from what is available, for all tokens that the sequence knows."""
    num_new = pool.blocks_for(len(sequence.token_ids)) - len(reuse.blocks)
    borrowed = () if reuse.copy_from is None else (reuse.copy_from,)
    return num_new + pool.num_idle((*reuse.blocks, *borrowed))


def _cached(pool: BlockPool, sequence: Sequence, limit: int) -> Reuse:
    if sequence.prefix is None:
        return Reuse((), 0)
    blocks = pool.match(sequence.prefix.of(sequence.token_ids))
    return _cut(blocks, min(limit, len(blocks) * pool.block_size), pool.block_size)


def _shared(pool: BlockPool, sequence: Sequence, limit: int) -> Reuse:
    source = sequence.source
    if source is None:
        return Reuse((), 0)
    # One that has ended or waits again holds nothing any more.
    num_tokens = min(limit, source.num_computed, pool.num_slots(source.job_id))
    return _cut(pool.table(source.job_id), num_tokens, pool.block_size)


def _cut(blocks: tuple[int, ...], num_tokens: int, block_size: int) -> Reuse:
    num_whole, num_rest = divmod(num_tokens, block_size)
    return Reuse(blocks[:num_whole], num_tokens, blocks[num_whole] if num_rest else None)
