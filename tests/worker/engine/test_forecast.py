from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from chairlift_worker.engine.blocks import BlockPool
from chairlift_worker.engine.forecast import OutputLengths, peak_slots
from chairlift_worker.engine.request import EngineConfig
from chairlift_worker.engine.scheduler import Scheduler
from chairlift_worker.engine.sequence import Sequence


def test_what_is_expected_of_an_output_depends_on_how_long_it_is() -> None:
    lengths = OutputLengths()
    for _ in range(600):
        for length in (10, 30, 50):
            lengths.add(length)
    assert 29 <= lengths.expected(0) <= 31
    assert lengths.expected(10) == 40
    assert lengths.expected(30) == 50
    assert lengths.expected(50) == 75, "longer than all: half as much again"


@given(st.lists(st.tuples(st.integers(1, 40), st.integers(1, 60)), min_size=1, max_size=12))
def test_the_peak_is_that_of_a_simulation(jobs: list[tuple[int, int]]) -> None:
    """Blocks of one token: then nothing is rounded."""
    lengths = OutputLengths()
    for _ in range(600):
        lengths.add(1_000_000)
    sequences = [Sequence(str(i), i, [7] * known, known + more + 1) for i, (known, more) in enumerate(jobs)]
    peak = max(sum(known + t for known, more in jobs if more >= t) for t in range(1, 62))
    assert peak_slots(sequences, lengths, 1) == peak


def test_few_are_preempted_where_outputs_are_much_shorter_than_allowed() -> None:
    """40 jobs that may write 1,000 tokens and write about 60, on a pool of 1,600 slots."""
    chance = random.Random(5)
    scheduler = Scheduler(BlockPool(100, 16), EngineConfig(16, 256, 256))
    ends: dict[str, int] = {}
    for order in range(200):
        num_prompt = chance.randint(20, 120)
        job = Sequence(f"job-{order}", order, [7] * num_prompt, num_prompt + 1000)
        ends[job.job_id] = num_prompt + round(min(400, chance.expovariate(1 / 60))) + 1
        scheduler.add(job)
    num_steps = num_riders = 0
    while scheduler.num_running or scheduler.num_waiting:
        schedule = scheduler.schedule()
        scheduler.commit(schedule)
        num_steps += 1
        num_riders += len(schedule.sequences)
        for rider, chunk in zip(schedule.sequences, schedule.chunks, strict=True):
            if chunk.num_logits:
                rider.token_ids.append(7)
                if len(rider.token_ids) >= ends[rider.job_id]:
                    scheduler.learn_length(rider)
                    scheduler.remove(rider)
    assert scheduler.num_preemptions <= 20, scheduler.num_preemptions
    assert num_riders / num_steps >= 8, "and the pool is not left empty for it"
