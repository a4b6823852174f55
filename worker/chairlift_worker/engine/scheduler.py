"""Who computes what in a step: plain data in, plain data out, no model.

One rule, no phases: every running sequence catches up from its computed to its known tokens, within
the step's token budget and the free blocks. A prompt, a chunk of a long prompt, a resumed job, a
preempted one and a decode differ only in how far they have to go. The earlier due goes first (see `due`).

The promises, and why they hold:

- Running jobs keep their pace: sequences with one token to go are served before longer ones, and beside
  them a step has at most `max_prefill_tokens` others (see `pace`).
- The first running sequence advances in every step. Budget: it is first among its kind, and at most
  max_num_seqs - 1 others take one token each before it, which is less than max_step_tokens. Blocks:
  it may take those of everybody behind it but the protected, and its whole length fits beside theirs.
- Preemptions of a job are bounded by `max_preemptions`: after so many it is protected, and nobody takes
  its blocks. A protected sequence boards only if its whole possible length fits beside those of all that
  run, and beside it only such board as fit with their whole length beside all protected ones. So a
  protected one, and the first of the others, can always grow, by taking from the last of the others.
- Blocks are only taken from the last unprotected sequence, by one before it or by a protected one, so no
  two can take from each other.
"""

from __future__ import annotations

from bisect import insort
from typing import NamedTuple

from chairlift_worker.engine.batch import Chunk
from chairlift_worker.engine.blocks import BlockPool
from chairlift_worker.engine.pace import Pace, StepLoad
from chairlift_worker.engine.plan import Plan
from chairlift_worker.engine.request import EngineConfig
from chairlift_worker.engine.reuse import Reuse
from chairlift_worker.engine.seats import Seats
from chairlift_worker.engine.sequence import Sequence


class Schedule(NamedTuple):
    """One step's work. `chunks[i]` belongs to `sequences[i]`."""

    sequences: tuple[Sequence, ...]
    chunks: tuple[Chunk, ...]
    num_prefill_tokens: int
    num_decode_tokens: int
    """Tokens of sequences that had just one to go."""
    num_context_tokens: int
    """Tokens that the sequences attend to, together."""

    @property
    def load(self) -> StepLoad:
        """What the time of the step depends on."""
        num_tokens = self.num_prefill_tokens + self.num_decode_tokens
        return StepLoad(len(self.sequences), num_tokens, self.num_context_tokens)


class Scheduler:
    """Owns the waiting and the running sequences; the only user of the block pool."""

    def __init__(self, pool: BlockPool, config: EngineConfig) -> None:
        config.check()
        self._pool = pool
        self._config = config
        self._waiting: list[Sequence] = []  # by rank: the first goes first
        self._seats = Seats(pool, config)
        most = config.max_step_tokens
        self._pace = Pace(config.max_prefill_tokens or most, most, config.target_itl_s)
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
        return len(self._seats.running)

    @property
    def running(self) -> tuple[Sequence, ...]:
        """The running sequences, by rank."""
        return tuple(self._seats.running)

    def add(self, sequence: Sequence) -> None:
        """Let it wait for a seat. The caller has checked that `max_slots` fits the pool."""
        assert self._pool.blocks_for(sequence.max_slots) <= self._pool.num_blocks, sequence.job_id
        insort(self._waiting, sequence, key=_rank)

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
        if sequence not in self._seats.running:
            self._waiting.remove(sequence)
            return
        if forget:
            self._pool.forget(sequence.job_id)
        self._seats.leave(sequence)

    def learn_length(self, sequence: Sequence) -> None:
        """It has come to its own end: from such the lengths of others are predicted."""
        self._seats.lengths.add(sequence.num_output)

    def learn_time(self, schedule: Schedule, seconds: float) -> None:
        """The step took so long."""
        self._pace.observe(schedule.load, seconds)

    def schedule(self) -> Schedule:
        """Choose the step's chunks and allocate their blocks; empty iff there is no sequence."""
        decodes: list[Sequence] = []
        others: list[Sequence] = []
        for sequence in self._seats.running:
            (decodes if sequence.num_pending == 1 else others).append(sequence)
        num_context = sum(len(sequence.token_ids) for sequence in decodes)
        load = StepLoad(len(decodes), len(decodes), num_context)
        plan = Plan(self._config.max_step_tokens, self._pace.prefill_budget(load))
        for sequence in (*decodes, *others):
            if sequence not in plan.preempted:
                self._place(sequence, plan)
        while plan.has_room and self._waiting and (reuse := self._seats.offer(self._waiting[0])) is not None:
            sequence = self._waiting.pop(0)
            self._board(sequence, reuse)
            self._place(sequence, plan)
        return self._finish(plan)

    def commit(self, schedule: Schedule) -> None:
        """The step ran: its chunks are in the cache now. Without this call it may simply be run again."""
        for sequence, chunk in zip(schedule.sequences, schedule.chunks, strict=True):
            if chunk.copy_from is not None:
                self._pool.give_back(sequence.job_id)
            first = sequence.num_computed // self._pool.block_size
            sequence.num_computed += len(chunk.token_ids)
            if sequence.num_computed // self._pool.block_size > first:
                self._name_blocks(sequence, first)

    def check(self) -> None:
        """Prove the books: the pool's own, and that exactly the running sequences hold blocks."""
        self._pool.check()
        self._seats.check()
        assert self._waiting == sorted(self._waiting, key=_rank)
        for sequence in self._waiting:
            assert sequence.num_computed == 0, sequence
            assert not self._pool.table(sequence.job_id), sequence

    def _place(self, sequence: Sequence, plan: Plan) -> None:
        """Give the sequence as many tokens as budget and blocks allow, perhaps none."""
        num_tokens = min(sequence.num_pending, plan.room(sequence), self._config.max_chunk_tokens)
        if num_tokens == 0:
            return
        num_slots = self._pool.num_slots(sequence.job_id)
        if num_slots < sequence.num_computed + num_tokens:  # not so for most decodes
            num_tokens = self._make_room(sequence, num_tokens, plan)
        if num_tokens:
            plan.give(sequence, num_tokens)

    def _make_room(self, sequence: Sequence, num_tokens: int, plan: Plan) -> int:
        """Add blocks for up to so many tokens, and for at least one if anybody's can be taken for it."""
        while not self._pool.can_grow(sequence.job_id, sequence.num_computed + 1):
            victim = self._seats.victim_of(sequence)
            if victim is None:
                return 0
            self._preempt(victim, plan)
        num_more = self._pool.num_available * self._pool.block_size
        num_reachable = self._pool.num_slots(sequence.job_id) + num_more
        num_tokens = min(num_tokens, num_reachable - sequence.num_computed)
        self._pool.grow(sequence.job_id, sequence.num_computed + num_tokens)
        return num_tokens

    def _preempt(self, sequence: Sequence, plan: Plan) -> None:
        plan.preempt(sequence)
        self._seats.leave(sequence)
        sequence.num_computed = 0
        sequence.num_preemptions += 1
        self.num_preemptions += 1
        insort(self._waiting, sequence, key=_rank)

    def _board(self, sequence: Sequence, reuse: Reuse) -> None:
        self._seats.take(sequence, reuse)
        if sequence.num_cached is None:
            sequence.num_cached = reuse.num_tokens
            self.num_boarded_tokens += len(sequence.token_ids)
            self.num_cached_tokens += reuse.num_tokens

    def _name_blocks(self, sequence: Sequence, first: int) -> None:
        """Let others find the blocks from index `first` on that are whole now."""
        if sequence.prefix is None:
            return
        num_whole = sequence.num_computed // self._pool.block_size
        hashes = sequence.prefix.of(sequence.token_ids)
        for index in range(first, num_whole):
            self._pool.name(sequence.job_id, index, hashes[index])

    def _finish(self, plan: Plan) -> Schedule:
        sequences = tuple(sequence for sequence in self._seats.running if sequence in plan.num_tokens)
        chunks = tuple(self._chunk(sequence, plan.num_tokens[sequence]) for sequence in sequences)
        num_decode_tokens = sum(1 for sequence in sequences if sequence.num_pending == 1)
        return Schedule(
            sequences=sequences,
            chunks=chunks,
            num_prefill_tokens=sum(plan.num_tokens.values()) - num_decode_tokens,
            num_decode_tokens=num_decode_tokens,
            num_context_tokens=sum(chunk.start + len(chunk.token_ids) for chunk in chunks),
        )

    def _chunk(self, sequence: Sequence, num_tokens: int) -> Chunk:
        start = sequence.num_computed
        return Chunk(
            token_ids=tuple(sequence.token_ids[start : start + num_tokens]),
            start=start,
            block_table=self._pool.table(sequence.job_id),
            num_logits=sequence.num_logits(start + num_tokens),
            copy_from=self._pool.borrowed(sequence.job_id),
            adapter=sequence.adapter,
        )


def _rank(sequence: Sequence) -> tuple[int, int]:
    return sequence.rank
