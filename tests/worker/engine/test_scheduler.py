from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from chairlift_client.errors import ConfigError
from chairlift_worker.engine.blocks import BlockPool
from chairlift_worker.engine.request import EngineConfig
from chairlift_worker.engine.scheduler import Schedule, Scheduler
from chairlift_worker.engine.sequence import Sequence

TOKEN = 7


def sequence(name: str, num_prompt: int, num_output: int, order: int) -> Sequence:
    return Sequence(name, order, [TOKEN] * num_prompt, num_prompt + num_output)


class SchedulerMachine(RuleBasedStateMachine):
    """Jobs come, go and are cancelled at any time, with tiny pools and budgets; steps may fail."""

    @initialize(
        num_blocks=st.integers(1, 10),
        block_size=st.integers(1, 4),
        max_num_seqs=st.integers(1, 5),
        spare_tokens=st.integers(0, 8),
        max_chunk_tokens=st.integers(1, 9),
        max_preemptions=st.integers(0, 3),
    )
    def build(
        self,
        num_blocks: int,
        block_size: int,
        max_num_seqs: int,
        spare_tokens: int,
        max_chunk_tokens: int,
        max_preemptions: int,
    ) -> None:
        self.pool = BlockPool(num_blocks, block_size)
        self.config = EngineConfig(
            max_num_seqs, max_num_seqs + spare_tokens, max_chunk_tokens, max_preemptions
        )
        self.scheduler = Scheduler(self.pool, self.config)
        self.alive: list[Sequence] = []
        self.num_jobs = 0

    @rule(data=st.data())
    def add(self, data: st.DataObject) -> None:
        most = self.pool.num_blocks * self.pool.block_size + 1
        num_total = data.draw(st.integers(2, most))
        num_prompt = data.draw(st.integers(1, num_total - 1))
        self.num_jobs += 1
        added = sequence(f"job-{self.num_jobs}", num_prompt, num_total - num_prompt, self.num_jobs)
        self.scheduler.add(added)
        self.alive.append(added)

    @precondition(lambda self: self.alive)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        victim = data.draw(st.sampled_from(self.alive))
        self.scheduler.remove(victim)
        self.alive.remove(victim)
        assert not self.pool.table(victim.job_id)

    @rule()
    def step_that_fails(self) -> None:
        self.check_schedule(self.scheduler.schedule())

    @rule()
    def step(self) -> None:
        schedule = self.scheduler.schedule()
        self.check_schedule(schedule)
        self.scheduler.commit(schedule)
        for rider, chunk in zip(schedule.sequences, schedule.chunks, strict=True):
            assert chunk.num_logits == (rider.num_pending == 0)
            if chunk.num_logits:
                rider.token_ids.append(TOKEN)
                if len(rider.token_ids) == rider.max_total_tokens:
                    self.scheduler.remove(rider)
                    self.alive.remove(rider)

    def check_schedule(self, schedule: Schedule) -> None:
        assert bool(schedule.chunks) == bool(self.alive)
        if self.alive:
            assert schedule.sequences[0] is self.alive[0], "the oldest always advances"
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
        # Each step brings the oldest at least one token nearer to its end.
        for _ in range(sum(living.max_total_tokens for living in self.alive)):
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
    pool = BlockPool(4, 2)
    scheduler = Scheduler(pool, EngineConfig(3, 16, 16))
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
