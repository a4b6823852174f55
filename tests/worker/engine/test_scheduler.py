from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from chairlift_client.errors import ConfigError
from chairlift_worker.engine.blocks import BlockPool
from chairlift_worker.engine.prefix import CacheIdentity, PrefixHashes
from chairlift_worker.engine.request import EngineConfig
from chairlift_worker.engine.scheduler import Schedule, Scheduler
from chairlift_worker.engine.sequence import Sequence

TOKEN = 7


def sequence(name: str, num_prompt: int, num_output: int, order: int) -> Sequence:
    return Sequence(name, order, [TOKEN] * num_prompt, num_prompt + num_output)


def expect_short_outputs(scheduler: Scheduler) -> None:
    """Let it have seen so many short outputs that it takes everybody on board, and has to preempt."""
    for _ in range(600):
        scheduler.learn_length(Sequence("short", 0, [TOKEN] * 2, 3, num_prompt=1))


class SchedulerMachine(RuleBasedStateMachine):
    """Jobs come, fork, go and are cancelled at any time, with tiny pools and budgets; steps may fail.

    Prompts are of one token again and again, so that most begin alike.
    """

    @initialize(
        num_blocks=st.integers(1, 10),
        block_size=st.integers(1, 4),
        max_num_seqs=st.integers(1, 5),
        spare_tokens=st.integers(0, 8),
        max_chunk_tokens=st.integers(1, 9),
        max_preemptions=st.integers(0, 3),
        max_prefill_tokens=st.integers(0, 5),
        expects_short=st.booleans(),
    )
    def build(
        self,
        num_blocks: int,
        block_size: int,
        max_num_seqs: int,
        spare_tokens: int,
        max_chunk_tokens: int,
        max_preemptions: int,
        max_prefill_tokens: int,
        expects_short: bool,
    ) -> None:
        self.pool = BlockPool(num_blocks, block_size)
        self.config = EngineConfig(
            max_num_seqs,
            max_num_seqs + spare_tokens,
            max_chunk_tokens,
            max_preemptions,
            max_prefill_tokens=max_prefill_tokens,
        )
        self.scheduler = Scheduler(self.pool, self.config)
        if expects_short:
            expect_short_outputs(self.scheduler)
        self.alive: list[Sequence] = []
        self.num_jobs = 0

    @rule(data=st.data(), due_ms=st.integers(0, 5), cached=st.booleans())
    def add(self, data: st.DataObject, due_ms: int, cached: bool) -> None:
        most = self.pool.num_blocks * self.pool.block_size + 1
        num_total = data.draw(st.integers(2, most))
        num_prompt = data.draw(st.integers(1, num_total - 1))
        added = self.make(num_prompt, num_total, due_ms, cached)
        self.scheduler.add(added)
        self.alive.append(added)

    def make(self, num_prompt: int, num_total: int, due_ms: int, cached: bool) -> Sequence:
        self.num_jobs += 1
        made = sequence(f"job-{self.num_jobs}", num_prompt, num_total - num_prompt, self.num_jobs)
        made.due_ms = due_ms
        made.prefix = PrefixHashes(CacheIdentity(), self.pool.block_size) if cached else None
        return made

    @precondition(lambda self: any(living.num_output for living in self.alive))
    @rule(data=st.data(), cached=st.booleans())
    def fork(self, data: st.DataObject, cached: bool) -> None:
        source = data.draw(st.sampled_from([living for living in self.alive if living.num_output]))
        fork = self.make(source.num_prompt, source.max_total_tokens, source.due_ms, cached)
        self.scheduler.fork(source, fork)
        self.alive.append(fork)

    @precondition(lambda self: self.alive)
    @rule(data=st.data(), forget=st.booleans())
    def cancel(self, data: st.DataObject, forget: bool) -> None:
        victim = data.draw(st.sampled_from(self.alive))
        self.scheduler.remove(victim, forget=forget)
        self.alive.remove(victim)
        assert not self.pool.table(victim.job_id)

    @rule()
    def step_that_fails(self) -> None:
        self.schedule()

    @rule()
    def step(self) -> None:
        schedule = self.schedule()
        self.scheduler.commit(schedule)
        for rider, chunk in zip(schedule.sequences, schedule.chunks, strict=True):
            assert chunk.num_logits == (rider.num_pending == 0)
            if chunk.num_logits:
                rider.token_ids.append(TOKEN)
                if len(rider.token_ids) == rider.max_total_tokens:
                    self.scheduler.learn_length(rider)
                    self.scheduler.remove(rider)
                    self.alive.remove(rider)

    def schedule(self) -> Schedule:
        decodes = [rider for rider in self.scheduler.running if rider.num_pending == 1]
        schedule = self.scheduler.schedule()
        self.check_schedule(schedule)
        if self.config.max_prefill_tokens and decodes:
            assert schedule.num_prefill_tokens <= self.config.max_prefill_tokens
        return schedule

    def check_schedule(self, schedule: Schedule) -> None:
        assert bool(schedule.chunks) == bool(self.alive)
        if self.alive:
            assert schedule.sequences[0] is self.scheduler.running[0], "the first always advances"
        num_tokens = 0
        for rider, chunk in zip(schedule.sequences, schedule.chunks, strict=True):
            assert 1 <= len(chunk.token_ids) <= self.config.max_chunk_tokens
            assert chunk.start == rider.num_computed
            assert chunk.start + len(chunk.token_ids) <= len(chunk.block_table) * self.pool.block_size
            assert chunk.block_table == self.pool.table(rider.job_id)
            num_tokens += len(chunk.token_ids)
        assert num_tokens == schedule.num_prefill_tokens + schedule.num_decode_tokens
        assert num_tokens <= self.config.max_step_tokens

    @invariant()
    def books_are_right(self) -> None:
        self.scheduler.check()
        assert self.scheduler.num_running + self.scheduler.num_waiting == len(self.alive)
        for living in self.alive:
            assert living.num_preemptions <= self.config.max_preemptions

    def teardown(self) -> None:
        if not hasattr(self, "alive"):
            return
        # Each step brings somebody a token nearer to its end; few of them are lost again.
        num_tokens = sum(living.max_total_tokens for living in self.alive)
        for _ in range(num_tokens * (self.config.max_preemptions + 1)):
            if not self.alive:
                break
            self.step()
            self.books_are_right()
        assert not self.alive, "not everything finished"
        assert self.pool.num_available == self.pool.num_blocks


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)


def run_step(scheduler: Scheduler) -> Schedule:
    """One step in which every completed chunk yields a token; finished sequences leave."""
    schedule = scheduler.schedule()
    scheduler.commit(schedule)
    for rider, chunk in zip(schedule.sequences, schedule.chunks, strict=True):
        if chunk.num_logits:
            rider.token_ids.append(TOKEN)
            if len(rider.token_ids) == rider.max_total_tokens:
                scheduler.remove(rider)
    return schedule


def test_decodes_go_before_a_long_prompt_and_the_prompt_takes_the_rest() -> None:
    scheduler = Scheduler(BlockPool(64, 4), EngineConfig(4, 10, 100))
    long = sequence("long", 40, 5, order=1)
    scheduler.add(long)
    scheduler.add(sequence("short", 2, 20, order=2))
    scheduler.add(sequence("shorter", 1, 20, order=3))
    counts: list[dict[str, int]] = []
    for _ in range(6):
        schedule = run_step(scheduler)
        pairs = zip(schedule.sequences, schedule.chunks, strict=True)
        counts.append({rider.job_id: len(chunk.token_ids) for rider, chunk in pairs})
        assert sum(counts[-1].values()) <= 10
    # Nobody else could board while the oldest took the whole budget; then they ride beside it.
    assert counts[0] == {"long": 10}
    assert counts[4] == {"long": 1, "short": 2, "shorter": 1}
    assert counts[5] == {"long": 1, "short": 1, "shorter": 1}


def test_running_jobs_keep_their_pace_while_a_long_prompt_is_read() -> None:
    scheduler = Scheduler(BlockPool(64, 4), EngineConfig(4, 6, 100))
    scheduler.add(sequence("first", 1, 30, order=1))
    scheduler.add(sequence("second", 1, 30, order=2))
    run_step(scheduler)
    # Even one that is older than they are.
    scheduler.add(sequence("long", 20, 5, order=0))
    for _ in range(5):
        schedule = run_step(scheduler)
        assert {rider.job_id for rider in schedule.sequences} == {"first", "second", "long"}
        assert (schedule.num_decode_tokens, schedule.num_prefill_tokens) == (2, 4)


def test_blocks_that_a_running_prompt_still_needs_are_not_given_to_newcomers() -> None:
    """10 blocks of 2: the long prompt needs 9 of them, but takes them a chunk at a time."""
    scheduler = Scheduler(BlockPool(10, 2), EngineConfig(4, 8, 4))
    long = sequence("long", 17, 2, order=0)
    scheduler.add(long)
    scheduler.add(sequence("short", 3, 4, order=1))
    while scheduler.num_running or scheduler.num_waiting:
        schedule = run_step(scheduler)
        assert schedule.sequences == (long,) or len(long.token_ids) == long.max_total_tokens
    assert scheduler.num_preemptions == 0


def test_preemption_takes_the_youngest_and_it_comes_back_first() -> None:
    pool = BlockPool(5, 2)
    scheduler = Scheduler(pool, EngineConfig(3, 16, 16))
    expect_short_outputs(scheduler)
    old, middle, young = (sequence(name, 2, 6, order) for order, name in enumerate("abc"))
    for added in (old, middle, young):
        scheduler.add(added)
    run_step(scheduler)
    assert scheduler.num_running == 3
    while scheduler.num_preemptions == 0:
        run_step(scheduler)
    assert (old.num_preemptions, middle.num_preemptions, young.num_preemptions) == (0, 0, 1)
    assert young.num_computed == 0
    while scheduler.num_running or scheduler.num_waiting:
        run_step(scheduler)
        scheduler.check()
    assert pool.num_available == pool.num_blocks


def test_ten_jobs_on_a_pool_for_two_all_finish_with_bounded_preemptions() -> None:
    config = EngineConfig(max_num_seqs=10, max_step_tokens=64, max_chunk_tokens=32, max_preemptions=2)
    scheduler = Scheduler(BlockPool(38, 16), config)
    expect_short_outputs(scheduler)
    jobs = [sequence(f"job-{order}", 30, 270, order) for order in range(10)]
    for job in jobs:
        scheduler.add(job)
    num_steps = 0
    while scheduler.num_running or scheduler.num_waiting:
        run_step(scheduler)
        scheduler.check()
        num_steps += 1
        assert num_steps <= 10 * 300
    assert all(len(job.token_ids) == 300 for job in jobs)
    assert scheduler.num_preemptions > 0
    assert max(job.num_preemptions for job in jobs) <= config.max_preemptions


def test_a_large_job_at_the_head_is_not_overtaken_for_ever() -> None:
    """Small jobs behind it wait until it has boarded, so a steady stream of them cannot starve it."""
    scheduler = Scheduler(BlockPool(8, 2), EngineConfig(4, 16, 16))
    scheduler.add(sequence("small-0", 4, 4, 0))
    run_step(scheduler)
    large = sequence("large", 14, 2, 1)
    scheduler.add(large)
    for order in range(2, 30):
        scheduler.add(sequence(f"small-{order}", 2, 2, order))
        run_step(scheduler)
    assert len(large.token_ids) == 16


@pytest.mark.parametrize(
    ("config", "numbers"),
    [
        (EngineConfig(max_num_seqs=0), ["0"]),
        (EngineConfig(max_chunk_tokens=0), ["0"]),
        (EngineConfig(max_preemptions=-1), ["-1"]),
        (EngineConfig(max_num_seqs=9, max_step_tokens=8), ["8", "9"]),
    ],
)
def test_settings_that_cannot_keep_the_promises_are_refused(config: EngineConfig, numbers: list[str]) -> None:
    with pytest.raises(ConfigError) as refusal:
        Scheduler(BlockPool(4, 4), config)
    assert all(number in str(refusal.value) for number in numbers)
