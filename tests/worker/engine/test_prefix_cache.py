"""The engine with its prefix cache: less to compute, and no output that is different."""

from __future__ import annotations

import random
from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chairlift_client.protocol import SamplingParams
from chairlift_worker.engine.blocks import BlockPool
from chairlift_worker.engine.engine import Engine
from chairlift_worker.engine.request import EngineConfig, EngineRequest, StepReport
from chairlift_worker.engine.scheduler import Schedule, Scheduler
from chairlift_worker.engine.sequence import Sequence
from context_runner import POISON, ContextRunner
from engine_runs import Told, expect_short_outputs, run
from tokenizer_kinds import byte_level

VOCAB = 640
GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)


def engine(
    config: EngineConfig | None = None,
    *,
    num_blocks: int = 256,
    block_size: int = 4,
    context_tokens: int = 512,
) -> Engine:
    runner = ContextRunner(
        vocab_size=VOCAB, num_blocks=num_blocks, block_size=block_size, context_tokens=context_tokens
    )
    return Engine(runner, byte_level(), config or EngineConfig(16, 256, 256))


def request(name: str, *token_ids: int, order: int = 0, salt: str = "", cache: bool = True) -> EngineRequest:
    return EngineRequest(name, token_ids, GREEDY, 1, order=order, cache=cache, cache_salt=salt)


def uncached(requests: Iterable[EngineRequest]) -> dict[str, Told]:
    """Each job by itself, in an engine that keeps nothing."""
    config = EngineConfig(1, 256, 256, prefix_cache=False)
    return {request.job_id: run(engine(config), [request])[request.job_id] for request in requests}


def ends(told: dict[str, Told]) -> dict[str, tuple[str | None, tuple[int, ...] | None, str | None]]:
    """What the jobs got, without how it was computed."""
    return {
        job_id: (answer.end.full_text, answer.end.full_token_ids, answer.end.finish_reason)
        for job_id, answer in told.items()
        if answer.end is not None
    }


def cached_tokens(told: Told) -> int:
    assert told.end is not None
    return told.end.cached_tokens


def conversations(num_jobs: int, seed: int) -> list[EngineRequest]:
    """Jobs that begin alike in many ways: the same system prompt, longer turns, the very same prompt."""
    chance = random.Random(seed)
    texts = [[chance.randrange(2, VOCAB) for _ in range(chance.randint(1, 9))] for _ in range(3)]
    requests = []
    for order in range(num_jobs):
        text = chance.choice(texts)
        if chance.random() < 0.7:
            text = text + [chance.randrange(2, VOCAB) for _ in range(chance.randint(1, 9))]
            texts.append(text)
        sampling = SamplingParams(
            temperature=chance.choice([0.0, 1.0]), max_tokens=chance.randint(1, 12), ignore_eos=True
        )
        requests.append(
            EngineRequest(
                f"job-{order}",
                tuple(text),
                sampling,
                chance.getrandbits(64),
                order=order,
                cache=chance.random() < 0.85,
                cache_salt=chance.choice(["", "", "other"]),
            )
        )
    return requests


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    num_jobs=st.integers(2, 12),
    block_size=st.integers(1, 5),
    spare_blocks=st.integers(0, 8),
    max_num_seqs=st.integers(1, 6),
    spare_tokens=st.integers(0, 20),
    max_chunk_tokens=st.integers(1, 20),
)
def test_the_cache_changes_no_output(
    seed: int,
    num_jobs: int,
    block_size: int,
    spare_blocks: int,
    max_num_seqs: int,
    spare_tokens: int,
    max_chunk_tokens: int,
) -> None:
    """Pools so tight that blocks are evicted, shared, preempted; jobs that are cancelled and resumed."""
    requests = conversations(num_jobs, seed)
    expected = uncached(requests)
    longest = max(len(r.prompt_token_ids) + (r.sampling.max_tokens or 0) for r in requests)
    lift = engine(
        EngineConfig(max_num_seqs, max_num_seqs + spare_tokens, max_chunk_tokens, max_preemptions=2),
        num_blocks=-(-longest // block_size) + spare_blocks,
        block_size=block_size,
    )
    if seed % 2:
        expect_short_outputs(lift)
    assert ends(run(lift, requests)) == ends(expected)
    chance = random.Random(seed)
    victim = chance.choice(requests)
    lift.add(victim)
    for _ in range(chance.randint(0, 3)):
        lift.step(now_ms=0)
        lift.check()
    lift.cancel(victim.job_id)
    resumed = []
    for again in requests:
        tokens = expected[again.job_id].token_ids
        resumed.append(again._replace(logged_token_ids=tuple(tokens[: chance.randint(0, len(tokens))])))
    assert ends(run(lift, resumed)) == ends(expected)


@pytest.mark.parametrize("num_prompt", [1, 3, 4, 5, 7, 8, 9, 12])
def test_the_same_prompt_again_computes_one_token(num_prompt: int) -> None:
    """At the edge of a block, too: its last block is copied, not computed again."""
    lift = engine()
    prompt = tuple(range(2, 2 + num_prompt))
    first = run(lift, [request("first", *prompt)])["first"]
    computed: list[int] = []
    again = run(lift, [request("again", *prompt)], on_step=lambda r: computed.append(num_computed(r)))[
        "again"
    ]
    assert cached_tokens(first) == 0
    whole = num_prompt // 4 * 4
    assert cached_tokens(again) == (num_prompt - 1 if whole == num_prompt else whole)
    assert computed[0] == num_prompt - cached_tokens(again)
    assert again.token_ids == first.token_ids


def num_computed(report: StepReport) -> int:
    return report.stats.num_prefill_tokens + report.stats.num_decode_tokens


def test_the_next_turn_of_a_chat_finds_question_and_answer() -> None:
    lift = engine()
    prompt = tuple(range(2, 12))
    answer = run(lift, [request("turn-1", *prompt)])["turn-1"].token_ids
    told = run(lift, [request("turn-2", *prompt, *answer, 99, 98)])["turn-2"]
    # The last token of the answer was never computed; of the other 15, three blocks are whole.
    assert cached_tokens(told) == 12
    assert told.token_ids == uncached([request("turn-2", *prompt, *answer, 99, 98)])["turn-2"].token_ids


def test_a_resumed_job_finds_what_the_first_attempt_computed() -> None:
    lift = engine()
    first = request("job 1", *range(2, 12))
    tokens = run(lift, [first])["job 1"].token_ids
    computed: list[int] = []
    resumed = request("job 2", *range(2, 12))._replace(logged_token_ids=tuple(tokens[:4]))
    told = run(lift, [resumed], on_step=lambda r: computed.append(num_computed(r)))["job 2"]
    assert told.token_ids == tokens[4:]
    assert computed[0] == 14 - 12
    assert cached_tokens(told) == 10, "no more than the prompt has"


def test_tenants_and_those_who_opt_out_share_nothing() -> None:
    lift = engine()
    prompt = tuple(range(2, 20))
    run(lift, [request("first", *prompt, salt="a")])
    assert cached_tokens(run(lift, [request("b", *prompt, salt="b")])["b"]) == 0
    assert cached_tokens(run(lift, [request("out", *prompt, salt="a", cache=False)])["out"]) == 0
    assert cached_tokens(run(lift, [request("a", *prompt, salt="a")])["a"]) == 16
    lonely = engine()
    run(lonely, [request("out", *prompt, cache=False)])
    assert cached_tokens(run(lonely, [request("in", *prompt)])["in"]) == 0, "it left nothing behind"


def test_a_cache_that_is_switched_off_keeps_nothing() -> None:
    lift = engine(EngineConfig(4, 64, 64, prefix_cache=False))
    run(lift, [request("first", *range(2, 20))])
    assert cached_tokens(run(lift, [request("again", *range(2, 20))])["again"]) == 0


def test_another_model_has_other_blocks() -> None:
    runner = ContextRunner(vocab_size=VOCAB)
    one = Engine(runner, byte_level(), EngineConfig(), fingerprint="one")
    other = Engine(runner, byte_level(), EngineConfig(), fingerprint="other")
    prefixes = [lift._prefix(request("job", 2, 3, 4, 5)) for lift in (one, other)]
    names = [list(prefix.of([2, 3, 4, 5])) for prefix in prefixes if prefix is not None]
    assert names[0] != names[1]


def test_the_longest_prompt_there_may_be_is_answered_from_the_cache() -> None:
    lift = engine(context_tokens=64, num_blocks=16)
    longest = request("longest", *(2 + index % 50 for index in range(63)))
    longest = longest._replace(sampling=SamplingParams(temperature=0.0, ignore_eos=True))
    first = run(lift, [longest])["longest"]
    again = run(lift, [longest._replace(job_id="again")])["again"]
    assert len(first.token_ids) == 1
    assert again.token_ids == first.token_ids
    assert cached_tokens(again) == 60


def test_a_full_pool_has_no_block_for_a_copy_and_computes_the_last_one_again() -> None:
    """4 blocks, and a prompt that fills them: there is none left to copy into."""
    lift = engine(num_blocks=4, context_tokens=64)
    full = request("first", *range(2, 18))._replace(sampling=SamplingParams(temperature=0.0, max_tokens=1))
    first = run(lift, [full])["first"]
    again = run(lift, [full._replace(job_id="again")])["again"]
    assert cached_tokens(again) == 12
    assert again.token_ids == first.token_ids


def test_what_a_bad_job_computed_is_not_used_again() -> None:
    lift = engine()
    bad = request("bad", 5, 6, 7, POISON, *range(8, 16))
    assert run(lift, [bad])["bad"].failure is not None
    assert lift._pool.num_cached == 0


def test_the_stats_count_hits() -> None:
    lift = engine()
    reports: list[StepReport] = []
    run(lift, [request("first", *range(2, 12)), request("second", 70, 71)], on_step=reports.append)
    run(lift, [request("again", *range(2, 12))], on_step=reports.append)
    stats = reports[-1].stats
    assert stats.num_boarded_tokens == 10 + 2 + 10
    assert stats.num_cached_tokens == 8
    # first: 15 tokens computed, 3 whole blocks; second: 7, 1 block. The same again leaves nothing new.
    assert stats.num_cached_blocks == 4


def test_a_preempted_job_finds_its_blocks_again() -> None:
    """Two jobs that together outgrow the pool: the younger gives its four blocks up, one is recycled."""
    lift = expect_short_outputs(engine(EngineConfig(4, 64, 64), num_blocks=8))
    old = request("old", *range(2, 14), order=0)
    young = request("young", *range(20, 32), order=1)
    young = young._replace(sampling=SamplingParams(temperature=0.0, max_tokens=14, ignore_eos=True))
    reports: list[StepReport] = []
    told = run(lift, [old, young], on_step=reports.append)
    assert ends(told) == ends(uncached([old, young]))
    assert reports[-1].stats.num_preemptions == 1
    assert sum(num_computed(report) for report in reports) == 17 + 16 + (25 - 12)


def sequence(name: str, tokens: Iterable[int], num_output: int, order: int = 0) -> Sequence:
    token_ids = list(tokens)
    return Sequence(name, order, token_ids, len(token_ids) + num_output)


def step(scheduler: Scheduler) -> Schedule:
    schedule = scheduler.schedule()
    scheduler.check()
    scheduler.commit(schedule)
    for rider, chunk in zip(schedule.sequences, schedule.chunks, strict=True):
        if chunk.num_logits:
            rider.token_ids.append(7)
    scheduler.check()
    return schedule


@pytest.mark.parametrize("num_prompt", [1, 4, 6, 8])
def test_choices_share_the_prompts_blocks_and_have_their_own_last_one(num_prompt: int) -> None:
    pool = BlockPool(32, 4)
    scheduler = Scheduler(pool, EngineConfig(8, 64, 64))
    prompt = list(range(2, 2 + num_prompt))
    source = sequence("job", prompt, 8)
    scheduler.add(source)
    step(scheduler)
    choices = [sequence(f"job#{choice}", prompt, 8) for choice in (1, 2)]
    for choice in choices:
        scheduler.fork(source, choice)
    schedule = step(scheduler)
    chunks = {rider.job_id: chunk for rider, chunk in zip(schedule.sequences, schedule.chunks, strict=True)}
    num_shared = (num_prompt - 1) // 4
    for choice in choices:
        chunk = chunks[choice.job_id]
        assert (chunk.token_ids, chunk.start, chunk.num_logits) == ((prompt[-1],), num_prompt - 1, 1)
        assert chunk.block_table[:num_shared] == pool.table("job")[:num_shared]
        assert chunk.copy_from == (pool.table("job")[num_shared] if (num_prompt - 1) % 4 else None)
        assert pool.borrowed(choice.job_id) is None
    last = [pool.table(name)[num_shared] for name in ("job", "job#1", "job#2")]
    assert len(set(last)) == 3
    for rider in (source, *choices):
        scheduler.remove(rider)
        scheduler.check()
    assert pool.num_available == 32


def test_a_choice_whose_source_is_gone_begins_from_what_is_left() -> None:
    scheduler = Scheduler(BlockPool(32, 4), EngineConfig(1, 64, 64))
    source = sequence("job", range(2, 8), 8)
    scheduler.add(source)
    step(scheduler)
    choice = sequence("job#1", range(2, 8), 8)
    scheduler.fork(source, choice)
    scheduler.remove(source)
    schedule = step(scheduler)
    assert schedule.chunks[0].start == 0


def test_a_step_that_fails_copies_again() -> None:
    pool = BlockPool(32, 4)
    scheduler = Scheduler(pool, EngineConfig(4, 64, 64))
    source = sequence("job", range(2, 8), 8)
    scheduler.add(source)
    step(scheduler)
    scheduler.fork(source, sequence("job#1", range(2, 8), 8))
    failed = scheduler.schedule()
    scheduler.check()
    scheduler.remove(source)
    scheduler.check()
    (chunk,) = scheduler.schedule().chunks
    assert chunk == failed.chunks[1]
    assert chunk.copy_from is not None
    scheduler.check()


def test_logits_that_somebody_asks_for_are_computed() -> None:
    lift = engine()
    run(lift, [request("first", *range(2, 14))])
    scheduler = lift._scheduler
    asks = sequence("asks", range(2, 14), 4)
    asks.prefix = lift._prefix(request("asks", *range(2, 14)))
    asks.logits_from = 6
    scheduler.add(asks)
    assert scheduler.schedule().chunks[0].start == 6
    scheduler.check()
