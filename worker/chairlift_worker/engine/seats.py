"""The running sequences, and who may become one of them."""

from __future__ import annotations

from bisect import insort

from chairlift_worker.engine.blocks import BlockPool
from chairlift_worker.engine.forecast import OutputLengths, peak_slots
from chairlift_worker.engine.request import EngineConfig
from chairlift_worker.engine.reuse import Reuse, find_reuse, num_blocks_taken
from chairlift_worker.engine.sequence import Sequence


class Seats:
    """Keeps the running sequences by rank; with the pool, it decides about boarding and preemption."""

    def __init__(self, pool: BlockPool, config: EngineConfig) -> None:
        self._pool = pool
        self._config = config
        self.running: list[Sequence] = []
        self.lengths = OutputLengths()
        self._whole = 0  # blocks that all running sequences may come to need …
        self._protected = 0  # … and the protected among them
        self._num_left = 0
        self._refused: tuple[Sequence, int] | None = None

    def offer(self, sequence: Sequence) -> Reuse | None:
        """What the first waiting sequence would board with; None if it may not take a seat.

        All its known tokens must fit beside all known tokens of those that run, though it may compute
        them in many steps, and so must what is expected to come: boarding on the first chunk's blocks
        alone would end in preemption. Alone, every sequence may board.
        """
        if len(self.running) >= self._config.max_num_seqs:
            return None
        # Those that run only grow: who was refused is refused until one of them leaves.
        if self._refused == (sequence, self._num_left):
            return None
        reuse = self._reuse(sequence)
        if reuse is None or not self._may_stay(sequence, reuse):
            self._refused = (sequence, self._num_left)
            return None
        return reuse

    def take(self, sequence: Sequence, reuse: Reuse) -> None:
        """Board it with what `offer` gave."""
        self._pool.adopt(sequence.job_id, reuse.blocks)
        if reuse.copy_from is not None:
            self._pool.borrow(sequence.job_id, reuse.copy_from)
        sequence.num_computed = reuse.num_tokens
        sequence.source = None
        insort(self.running, sequence, key=_rank)
        self._count(sequence, +1)

    def leave(self, sequence: Sequence) -> None:
        """Give its seat and its blocks up."""
        self.running.remove(sequence)
        self._count(sequence, -1)
        self._pool.release(sequence.job_id)
        self._num_left += 1

    def victim_of(self, sequence: Sequence) -> Sequence | None:
        """Whose blocks the sequence may take: the last unprotected one's, unless that is itself."""
        last = next((other for other in reversed(self.running) if not self._is_protected(other)), None)
        return None if last is sequence else last

    def check(self) -> None:
        """Prove the books of those that run."""
        assert self.running == sorted(self.running, key=_rank)
        assert len(self.running) <= self._config.max_num_seqs
        for sequence in self.running:
            assert sequence.num_pending >= 1, sequence
            assert sequence.num_computed <= self._pool.num_slots(sequence.job_id), sequence
        held = {block for sequence in self.running for block in self._pool.table(sequence.job_id)}
        held |= {block for s in self.running if (block := self._pool.borrowed(s.job_id)) is not None}
        assert self._pool.num_owned == len(held), (self._pool.num_owned, len(held))
        protected = [sequence for sequence in self.running if self._is_protected(sequence)]
        assert self._whole == sum(map(self._whole_blocks, self.running))
        assert self._protected == sum(map(self._whole_blocks, protected))
        for sequence in self.running:
            if sequence not in protected:
                assert self._protected + self._whole_blocks(sequence) <= self._pool.num_blocks, sequence
        assert self._protected <= self._pool.num_blocks

    def _reuse(self, sequence: Sequence) -> Reuse | None:
        """What it can begin with, if all that it knows fits."""
        pool = self._pool
        # Those with one token to go have its slot already: they were served before anybody may board.
        promised = sum(
            pool.num_missing(other.job_id, len(other.token_ids))
            for other in self.running
            if other.num_pending > 1
        )
        num_left = pool.num_available - promised
        reuse = find_reuse(pool, sequence)
        if num_blocks_taken(pool, sequence, reuse) > num_left:
            reuse = reuse.without_copy(pool.block_size)  # the block to copy from may be one too many
        return reuse if num_blocks_taken(pool, sequence, reuse) <= num_left else None

    def _may_stay(self, sequence: Sequence, reuse: Reuse) -> bool:
        whole, total = self._whole_blocks(sequence), self._pool.num_blocks
        if not self.running or self._whole + whole <= total:
            return True
        if self._is_protected(sequence) or self._protected + whole > total:
            return False
        peak = peak_slots((*self.running, sequence), self.lengths, self._pool.block_size)
        return peak <= (total + self._num_shared(reuse)) * self._pool.block_size

    def _num_shared(self, reuse: Reuse) -> int:
        """Blocks that would be counted more than once."""
        num_counted = sum(self._pool.num_slots(other.job_id) for other in self.running)
        num_twice = num_counted // self._pool.block_size - self._pool.num_owned
        return max(0, num_twice) + len(reuse.blocks) - self._pool.num_idle(reuse.blocks)

    def _is_protected(self, sequence: Sequence) -> bool:
        return sequence.num_preemptions >= self._config.max_preemptions

    def _whole_blocks(self, sequence: Sequence) -> int:
        return self._pool.blocks_for(sequence.max_slots)

    def _count(self, sequence: Sequence, sign: int) -> None:
        whole = sign * self._whole_blocks(sequence)
        self._whole += whole
        if self._is_protected(sequence):
            self._protected += whole


def _rank(sequence: Sequence) -> tuple[int, int]:
    return sequence.rank
