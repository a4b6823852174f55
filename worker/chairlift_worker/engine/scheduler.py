"""Who computes what in a step: plain data in, plain data out, no model.

One rule, no phases: every running sequence catches up from its computed to its known tokens, within
the step's token budget and the free blocks. A prompt, a chunk of a long prompt, a resumed job, a
preempted one and a decode differ only in how far they have to go.

The promises, and why they hold:

- Running jobs keep their pace: sequences with one token to go are served before longer ones.
- The oldest running sequence advances in every step. Budget: it is first among its kind, and at most
  max_num_seqs - 1 others take one token each before it, which is less than max_step_tokens. Blocks:
  it may take those of everybody younger, and alone it fits the pool (checked on arrival).
- A sequence that finds no block takes the youngest one's; if it is itself the youngest, it keeps its
  blocks and waits. So only older ones ever take blocks away, and no two can take from each other.
- Preemptions of one job are bounded: after `max_preemptions` it boards again only when its whole
  possible length fits beside the whole possible lengths of all that run. All of those are older
  (boarding is strictly by age, preemption strictly by youth), so none of them can ever need its blocks.
  This needs orders that grow with time; an older job that arrives late may cost one preemption more.
"""

from __future__ import annotations

from bisect import insort
from typing import NamedTuple

from chairlift_worker.engine.batch import Chunk
from chairlift_worker.engine.blocks import BlockPool
from chairlift_worker.engine.request import EngineConfig
from chairlift_worker.engine.reuse import Reuse, find_reuse, num_blocks_taken
from chairlift_worker.engine.sequence import Sequence


class Schedule(NamedTuple):
    """One step's work. `chunks[i]` belongs to `sequences[i]`."""

    sequences: tuple[Sequence, ...]
    chunks: tuple[Chunk, ...]
    num_prefill_tokens: int
    num_decode_tokens: int
    """Tokens of sequences that had just one to go."""


class Scheduler:
    """Owns the waiting and the running sequences; the only user of the block pool."""

    def __init__(self, pool: BlockPool, config: EngineConfig) -> None:
        config.check()
        self._pool = pool
        self._config = config
        self._waiting: list[Sequence] = []  # both lists: oldest first
        self._running: list[Sequence] = []
        self.num_preemptions = 0
        self.num_boarded_tokens = 0
        """Tokens that sequences knew when they first boarded …"""
        self.num_cached_tokens = 0
        """… and those among them that were computed already."""

    @property
    def num_waiting(self) -> int:
        """Sequences that hold no blocks."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Sequences that hold blocks."""
        return len(self._running)

    @property
    def running(self) -> tuple[Sequence, ...]:
        """The running sequences, oldest first."""
        return tuple(self._running)

    def add(self, sequence: Sequence) -> None:
        """Let it wait for a seat. The caller has checked that `max_slots` fits the pool."""
        assert self._pool.blocks_for(sequence.max_slots) <= self._pool.num_blocks, sequence.job_id
        insort(self._waiting, sequence, key=_age)

    def fork(self, source: Sequence, sequence: Sequence) -> None:
        """`add` one that begins alike: it boards with what the source has computed by then.

        All tokens of `sequence` must be the first ones of `source`. Whole blocks are shared, the block in
        the middle of which they part is copied. This needs no prefix cache; a source that has ended by
        then leaves only what the cache has kept.
        """
        assert source.token_ids[: len(sequence.token_ids)] == sequence.token_ids, sequence.job_id
        sequence.source = source
        self.add(sequence)

    def remove(self, sequence: Sequence, *, forget: bool = False) -> None:
        """Take it out, whether it waits or runs, and free its blocks; `forget` what they hold if bad."""
        (self._running if sequence in self._running else self._waiting).remove(sequence)
        if forget:
            self._pool.forget(sequence.job_id)
        self._pool.release(sequence.job_id)

    def schedule(self) -> Schedule:
        """Choose the step's chunks and allocate their blocks; empty iff there is no sequence."""
        plan = _Plan(self._config.max_step_tokens)
        # Stable: those with one token to go first, each kind by age.
        for sequence in sorted(self._running, key=lambda sequence: sequence.num_pending > 1):
            if sequence not in plan.preempted:
                self._place(sequence, plan)
        while plan.budget > 0 and (reuse := self._reuse_if_boarding()) is not None:
            sequence = self._waiting.pop(0)
            self._board(sequence, reuse)
            self._place(sequence, plan)
        return self._finish(plan)

    def commit(self, schedule: Schedule) -> None:
        """The step ran: its chunks are in the cache now. Without this call it may simply be run again."""
        for sequence, chunk in zip(schedule.sequences, schedule.chunks, strict=True):
            self._pool.give_back(sequence.job_id)
            first = sequence.num_computed // self._pool.block_size
            sequence.num_computed += len(chunk.token_ids)
            self._name_blocks(sequence, first)

    def check(self) -> None:
        """Prove the books: the pool's own, and that exactly the running sequences hold blocks."""
        self._pool.check()
        assert self._running == sorted(self._running, key=_age)
        assert self._waiting == sorted(self._waiting, key=_age)
        assert len(self._running) <= self._config.max_num_seqs
        for sequence in self._waiting:
            assert sequence.num_computed == 0, sequence
            assert not self._pool.table(sequence.job_id), sequence
        for sequence in self._running:
            assert sequence.num_pending >= 1, sequence
            assert sequence.num_computed <= self._pool.num_slots(sequence.job_id), sequence
        held = {block for sequence in self._running for block in self._pool.table(sequence.job_id)}
        held |= {block for s in self._running if (block := self._pool.borrowed(s.job_id)) is not None}
        assert self._pool.num_owned == len(held), (self._pool.num_owned, len(held))

    def _place(self, sequence: Sequence, plan: _Plan) -> None:
        """Give the sequence as many tokens as budget and blocks allow, perhaps none."""
        if plan.budget == 0:
            return
        while not self._pool.can_grow(sequence.job_id, sequence.num_computed + 1):
            if self._running[-1] is sequence:
                return
            self._preempt(self._running[-1], plan)
        num_more = self._pool.num_available * self._pool.block_size
        num_reachable = self._pool.num_slots(sequence.job_id) + num_more
        num_tokens = min(
            sequence.num_pending,
            plan.budget,
            self._config.max_chunk_tokens,
            num_reachable - sequence.num_computed,
        )
        self._pool.grow(sequence.job_id, sequence.num_computed + num_tokens)
        plan.give(sequence, num_tokens)

    def _preempt(self, sequence: Sequence, plan: _Plan) -> None:
        plan.preempt(sequence)
        self._running.remove(sequence)
        self._pool.release(sequence.job_id)
        sequence.num_computed = 0
        sequence.num_preemptions += 1
        self.num_preemptions += 1
        insort(self._waiting, sequence, key=_age)

    def _reuse_if_boarding(self) -> Reuse | None:
        """What the oldest waiting sequence boards with; None if it may not take a seat.

        All its known tokens must fit beside all known tokens of those that run, though it may compute
        them in many steps: boarding on the first chunk's blocks alone would end in preemption.
        """
        if not self._waiting or len(self._running) >= self._config.max_num_seqs:
            return None
        sequence, pool = self._waiting[0], self._pool
        num_promised = sum(pool.num_missing(other.job_id, len(other.token_ids)) for other in self._running)
        num_left = pool.num_available - num_promised
        reuse = find_reuse(pool, sequence)
        if num_blocks_taken(pool, sequence, reuse) > num_left:
            reuse = reuse.without_copy(pool.block_size)  # the block to copy from may be one too many
        if num_blocks_taken(pool, sequence, reuse) > num_left:
            return None
        if sequence.num_preemptions < self._config.max_preemptions:
            return reuse
        whole = sum(pool.blocks_for(other.max_slots) for other in self._running)
        return reuse if whole + pool.blocks_for(sequence.max_slots) <= pool.num_blocks else None

    def _board(self, sequence: Sequence, reuse: Reuse) -> None:
        self._pool.adopt(sequence.job_id, reuse.blocks)
        if reuse.copy_from is not None:
            self._pool.borrow(sequence.job_id, reuse.copy_from)
        sequence.num_computed = reuse.num_tokens
        sequence.source = None
        if sequence.num_cached is None:
            sequence.num_cached = reuse.num_tokens
            self.num_boarded_tokens += len(sequence.token_ids)
            self.num_cached_tokens += reuse.num_tokens
        insort(self._running, sequence, key=_age)

    def _name_blocks(self, sequence: Sequence, first: int) -> None:
        """Let others find the blocks from index `first` on that are whole now."""
        num_whole = sequence.num_computed // self._pool.block_size
        if sequence.prefix is None or num_whole == first:
            return
        hashes = sequence.prefix.of(sequence.token_ids)
        for index in range(first, num_whole):
            self._pool.name(sequence.job_id, index, hashes[index])

    def _finish(self, plan: _Plan) -> Schedule:
        sequences = tuple(sequence for sequence in self._running if sequence in plan.num_tokens)
        chunks = tuple(self._chunk(sequence, plan.num_tokens[sequence]) for sequence in sequences)
        num_decode_tokens = sum(1 for sequence in sequences if sequence.num_pending == 1)
        return Schedule(
            sequences=sequences,
            chunks=chunks,
            num_prefill_tokens=sum(plan.num_tokens.values()) - num_decode_tokens,
            num_decode_tokens=num_decode_tokens,
        )

    def _chunk(self, sequence: Sequence, num_tokens: int) -> Chunk:
        start = sequence.num_computed
        return Chunk(
            token_ids=tuple(sequence.token_ids[start : start + num_tokens]),
            start=start,
            block_table=self._pool.table(sequence.job_id),
            num_logits=sequence.num_logits(start + num_tokens),
            copy_from=self._pool.borrowed(sequence.job_id),
        )


class _Plan:
    """Tokens given out so far in the step being scheduled."""

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.num_tokens: dict[Sequence, int] = {}
        self.preempted: set[Sequence] = set()

    def give(self, sequence: Sequence, num_tokens: int) -> None:
        self.num_tokens[sequence] = num_tokens
        self.budget -= num_tokens

    def preempt(self, sequence: Sequence) -> None:
        self.preempted.add(sequence)
        self.budget += self.num_tokens.pop(sequence, 0)


def _age(sequence: Sequence) -> int:
    return sequence.order
