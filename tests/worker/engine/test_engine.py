"""The engine over a runner whose logits depend on every token of the context and nothing else."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chairlift_client.protocol import SamplingParams
from chairlift_worker.engine.engine import Engine
from chairlift_worker.engine.request import EngineConfig, EngineRequest, StepReport
from context_runner import POISON, ContextRunner
from engine_runs import Told, expect_short_outputs, run
from tokenizer_kinds import byte_level

ROOMY = EngineConfig(max_num_seqs=16, max_step_tokens=256, max_chunk_tokens=256)
VOCAB = 640


def engine(config: EngineConfig = ROOMY, *, num_blocks: int = 256, block_size: int = 4) -> Engine:
    runner = ContextRunner(vocab_size=VOCAB, num_blocks=num_blocks, block_size=block_size)
    return Engine(runner, byte_level(), config)


def some_requests(num_jobs: int, seed: int) -> list[EngineRequest]:
    """Mixed lengths, greedy and seeded, with and without stops."""
    chance = random.Random(seed)
    samplings = [
        SamplingParams(temperature=0.0, max_tokens=24),
        SamplingParams(max_tokens=30, top_p=0.9, ignore_eos=True),
        SamplingParams(temperature=0.8, max_tokens=20, top_k=20, stop=("e", " a")),
        SamplingParams(max_tokens=17, min_p=0.05, min_tokens=6, stop_token_ids=(40, 41, 42)),
    ]
    return [
        EngineRequest(
            job_id=f"job-{order}",
            prompt_token_ids=tuple(chance.randrange(2, VOCAB) for _ in range(chance.randint(1, 25))),
            sampling=samplings[order % len(samplings)],
            seed=chance.getrandbits(64),
            order=order,
        )
        for order in range(num_jobs)
    ]


def alone(requests: list[EngineRequest]) -> dict[str, Told]:
    """Each job by itself in a roomy engine: what everybody must get in any company."""
    return {request.job_id: run(engine(), [request])[request.job_id] for request in requests}


def test_nothing_to_do() -> None:
    idle = engine()
    assert not idle.has_work
    assert idle.step(now_ms=0) is None
    assert not idle.cancel("nobody")


@settings(max_examples=15, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    num_jobs=st.integers(2, 8),
    block_size=st.integers(1, 7),
    spare_blocks=st.integers(0, 6),
    max_num_seqs=st.integers(1, 8),
    spare_tokens=st.integers(0, 20),
    max_chunk_tokens=st.integers(1, 20),
)
def test_outputs_depend_on_the_request_alone(
    seed: int,
    num_jobs: int,
    block_size: int,
    spare_blocks: int,
    max_num_seqs: int,
    spare_tokens: int,
    max_chunk_tokens: int,
) -> None:
    requests = some_requests(num_jobs, seed)
    expected = alone(requests)
    longest = max(len(r.prompt_token_ids) + (r.sampling.max_tokens or 0) for r in requests)
    crowded = engine(
        EngineConfig(max_num_seqs, max_num_seqs + spare_tokens, max_chunk_tokens, max_preemptions=2),
        num_blocks=-(-longest // block_size) + spare_blocks,
        block_size=block_size,
    )
    if seed % 2:
        expect_short_outputs(crowded)
    random.Random(seed).shuffle(requests)
    shuffled = [request._replace(order=order) for order, request in enumerate(requests)]
    assert {job_id: told.end for job_id, told in run(crowded, shuffled).items()} == {
        job_id: told.end for job_id, told in expected.items()
    }


def test_preemption_changes_no_output_and_is_bounded() -> None:
    """A pool for two, ten jobs of 300 tokens."""
    requests = [
        EngineRequest(
            f"job-{order}",
            (order + 2,) * 30,
            SamplingParams(max_tokens=270, ignore_eos=True),
            order,
            order=order,
        )
        for order in range(10)
    ]
    config = EngineConfig(max_num_seqs=10, max_step_tokens=64, max_chunk_tokens=32, max_preemptions=2)
    num_preemptions = 0

    def watch(report: StepReport) -> None:
        nonlocal num_preemptions
        num_preemptions = report.stats.num_preemptions

    crowded = expect_short_outputs(engine(config, num_blocks=38, block_size=16))
    told = run(crowded, requests, on_step=watch)
    assert 0 < num_preemptions <= 10 * config.max_preemptions
    assert all(len(answer.token_ids) == 270 for answer in told.values())
    for request in requests[::3]:
        assert told[request.job_id].token_ids == alone([request])[request.job_id].token_ids


@pytest.mark.parametrize("kind", range(4))
def test_a_job_resumes_at_every_point_as_if_nothing_had_happened(kind: int) -> None:
    request = some_requests(8, seed=11)[4 + kind]
    whole = alone([request])[request.job_id]
    for split in range(len(whole.token_ids) + 1):
        resumed = request._replace(logged_token_ids=tuple(whole.token_ids[:split]))
        rest = run(engine(EngineConfig(4, 9, 5)), [resumed])[request.job_id]
        assert rest.token_ids == whole.token_ids[split:]
        assert rest.text == "".join(whole.texts[split:])
        assert rest.end is not None
        assert whole.end is not None
        assert rest.end.full_text == whole.end.full_text
        assert rest.end.full_token_ids == whole.end.full_token_ids
        assert rest.end.finish_reason == whole.end.finish_reason
        assert rest.end.stop_reason == whole.end.stop_reason


def test_a_job_whose_log_is_complete_ends_at_once_without_a_forward() -> None:
    request = some_requests(1, seed=1)[0]
    whole = alone([request])[request.job_id]
    runner = ContextRunner(vocab_size=VOCAB)
    resumed = Engine(runner, byte_level(), ROOMY)
    resumed.add(request._replace(logged_token_ids=tuple(whole.token_ids)))
    assert resumed.has_work
    report = resumed.step(now_ms=0)
    assert report is not None
    assert runner.num_steps == 0
    (delta,) = report.deltas
    assert (delta.token_ids, delta.text, delta.offset) == ((), "", len(whole.token_ids))
    assert whole.end is not None
    assert (delta.full_text, delta.finish_reason) == (whole.end.full_text, whole.end.finish_reason)
    assert resumed.step(now_ms=0) is None


def test_logits_that_are_not_finite_fail_that_job_alone() -> None:
    neighbours = some_requests(6, seed=3)
    expected = alone(neighbours)
    bad = EngineRequest("bad", (5, POISON, 6), SamplingParams(), seed=1, order=99)
    told = run(engine(EngineConfig(8, 40, 6)), [*neighbours[:3], bad, *neighbours[3:]])
    failure = told.pop("bad").failure
    assert failure is not None
    assert failure.code == "numerics"
    assert {job_id: answer.end for job_id, answer in told.items()} == {
        job_id: answer.end for job_id, answer in expected.items()
    }


def test_a_deadline_ends_waiting_and_running_jobs() -> None:
    small = engine(EngineConfig(1, 8, 8))
    for order, name in enumerate(("runs", "waits", "late")):
        deadline_ms = None if name == "late" else 1000
        small.add(EngineRequest(name, (5, 6, 7), SamplingParams(max_tokens=50), 1, (), deadline_ms, order))
    report = small.step(now_ms=999)
    assert report is not None
    assert not report.failures
    assert report.stats.job_ids == ("runs",)
    report = small.step(now_ms=1000)
    assert report is not None
    assert {(failure.job_id, failure.code) for failure in report.failures} == {
        ("runs", "deadline"),
        ("waits", "deadline"),
    }
    assert all("1000" in failure.message for failure in report.failures)
    assert report.stats.job_ids == ("late",)
    small.check()


def test_only_deadlines_to_report() -> None:
    small = engine()
    small.add(EngineRequest("late", (5,), SamplingParams(), 1, deadline_ms=5))
    report = small.step(now_ms=6)
    assert report is not None
    assert report.stats.num_sequences == 0
    assert small.step(now_ms=7) is None
    assert small.num_free_blocks == small.num_blocks


@pytest.mark.parametrize("when", ["queued", "mid-prefill", "mid-decode", "preempted", "ended"])
def test_a_cancelled_job_gives_its_blocks_back(when: str) -> None:
    crowded = expect_short_outputs(engine(EngineConfig(2, 8, 4), num_blocks=12, block_size=4))
    sampling = SamplingParams(max_tokens=20, ignore_eos=True)
    first = EngineRequest("first", (5,) * 12, sampling, 1, order=0)
    victim = EngineRequest("victim", (6,) * 14, sampling, 2, order=1)
    crowded.add(first)
    if when == "ended":
        tokens = tuple(alone([victim])["victim"].token_ids)
        crowded.add(victim._replace(logged_token_ids=tokens))
    else:
        crowded.add(victim)
    told = Told()
    steps = 0
    while not _is(when, crowded, steps):
        report = crowded.step(now_ms=0)
        assert report is not None
        for delta in report.deltas:
            if delta.job_id == "first":
                told.hear(delta)
        steps += 1
    assert crowded.cancel("victim")
    assert not crowded.cancel("victim")
    crowded.check()
    while (report := crowded.step(now_ms=0)) is not None:
        assert {delta.job_id for delta in report.deltas} <= {"first"}
        assert "victim" not in report.stats.job_ids
        for delta in report.deltas:
            told.hear(delta)
    assert crowded.num_free_blocks == crowded.num_blocks
    assert told.token_ids == alone([first])["first"].token_ids


def _is(when: str, crowded: Engine, steps: int) -> bool:
    """Whether the victim of the test above is where it shall be cancelled."""
    job = crowded._jobs.get("victim")
    if when in {"queued", "ended"}:
        return steps == 0
    assert job is not None
    sequence = job.choices[0].sequence
    num_computed = sequence.num_computed
    if when == "mid-prefill":
        return 0 < num_computed < 14
    if when == "mid-decode":
        return num_computed > 16
    return sequence.num_preemptions > 0 and num_computed == 0


def test_a_step_that_fails_may_be_tried_again() -> None:
    requests = some_requests(4, seed=8)
    expected = alone(requests)
    runner = ContextRunner(vocab_size=VOCAB, num_blocks=24, block_size=4)
    shaky = Engine(runner, byte_level(), EngineConfig(4, 12, 6))
    told = {request.job_id: Told() for request in requests}
    for request in requests:
        shaky.add(request)
    num_failures = 0
    while shaky.has_work:
        runner.fail_next = True
        with pytest.raises(RuntimeError, match="out of memory"):
            shaky.step(now_ms=0)
        shaky.check()
        num_failures += 1
        report = shaky.step(now_ms=0)
        assert report is not None
        for delta in report.deltas:
            told[delta.job_id].hear(delta)
    assert num_failures > 10
    assert {job_id: answer.end for job_id, answer in told.items()} == {
        job_id: answer.end for job_id, answer in expected.items()
    }


def test_a_failed_step_loses_no_failure_and_no_ending() -> None:
    runner = ContextRunner(vocab_size=VOCAB)
    shaky = Engine(runner, byte_level(), ROOMY)
    sampling = SamplingParams(max_tokens=2, ignore_eos=True)
    shaky.add(EngineRequest("late", (5,), sampling, 1, deadline_ms=1))
    shaky.add(EngineRequest("complete", (5,), sampling, 1, logged_token_ids=(7, 8)))
    shaky.add(EngineRequest("runs", (5,), sampling, 1))
    runner.fail_next = True
    with pytest.raises(RuntimeError):
        shaky.step(now_ms=2)
    report = shaky.step(now_ms=2)
    assert report is not None
    assert [failure.job_id for failure in report.failures] == ["late"]
    assert {delta.job_id for delta in report.deltas} == {"complete", "runs"}


def test_jobs_join_and_leave_while_others_ride() -> None:
    requests = some_requests(12, seed=21)
    expected = alone(requests)
    lift = engine(EngineConfig(4, 20, 8))
    told = {request.job_id: Told() for request in requests}
    riders: list[tuple[str, ...]] = []
    to_come = list(requests)
    while to_come or lift.has_work:
        if to_come and lift.num_free_seats:
            lift.add(to_come.pop(0))
        report = lift.step(now_ms=0)
        assert report is not None
        riders.append(report.stats.job_ids)
        for delta in report.deltas:
            told[delta.job_id].hear(delta)
    assert {job_id: answer.end for job_id, answer in told.items()} == {
        job_id: answer.end for job_id, answer in expected.items()
    }
    assert max(map(len, riders)) == 4
    assert any(set(now) - set(before) and set(now) & set(before) for before, now in pairwise(riders))


def test_the_stats_tell_what_the_step_did() -> None:
    lift = engine(EngineConfig(4, 16, 16))
    sampling = SamplingParams(max_tokens=3, ignore_eos=True)
    lift.add(EngineRequest("long", tuple(range(2, 22)), sampling, 1, order=0))
    lift.add(EngineRequest("short", (5, 6), sampling, 2, order=1))
    stats = []
    while (report := lift.step(now_ms=0)) is not None:
        stats.append(report.stats)
    assert [stat.step for stat in stats] == [1, 2, 3, 4]
    assert [stat.job_ids for stat in stats] == [
        ("long",),
        ("long", "short"),
        ("long", "short"),
        ("long", "short"),
    ]
    assert [stat.num_prefill_tokens for stat in stats] == [16, 6, 0, 0]
    assert [stat.num_decode_tokens for stat in stats] == [0, 0, 2, 2]
    assert stats[1].num_owned_blocks == 6
    assert stats[-1].num_owned_blocks == 0
    assert all(min(stat.schedule_s, stat.forward_s, stat.sample_s) >= 0.0 for stat in stats)
