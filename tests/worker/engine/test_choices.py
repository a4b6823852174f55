"""Several choices, logprobs, penalties and bans in the engine, one question each."""

from __future__ import annotations

import pytest
import torch

from chairlift_client.errors import InvalidJob
from chairlift_client.protocol import SamplingParams, TokenLogprobs
from chairlift_worker.engine.engine import Engine
from chairlift_worker.engine.logprobs import token_logprobs
from chairlift_worker.engine.request import EngineConfig, EngineRequest, Failure, StepReport, TokenDelta
from context_runner import EOS, POISON, ContextRunner
from sampling_oracle import judge
from tokenizer_kinds import byte_level

VOCAB = 64
BLOCK = 4
PROMPT = tuple(5 + i % 40 for i in range(3 * BLOCK))
"""A multiple of the block size: wholly in the cache the second time."""


def engine(*, cache: bool = True, chunk: int = 256, num_blocks: int = 64) -> Engine:
    runner = ContextRunner(vocab_size=VOCAB, num_blocks=num_blocks, block_size=BLOCK)
    config = EngineConfig(16, max(chunk, 16), chunk, prefix_cache=cache)
    return Engine(runner, byte_level(), config)


def request(name: str, sampling: SamplingParams, prompt: tuple[int, ...] = PROMPT) -> EngineRequest:
    return EngineRequest(name, prompt, sampling, seed=77, order=int(name.removeprefix("job-") or 0))


def ride(lift: Engine, *requests: EngineRequest) -> tuple[dict[str, list[TokenDelta]], list[StepReport]]:
    """The deltas of each job, and all reports."""
    told: dict[str, list[TokenDelta]] = {request.job_id: [] for request in requests}
    reports = []
    for one in requests:
        lift.add(one)
    while (report := lift.step(now_ms=0)) is not None:
        lift.check()
        reports.append(report)
        for delta in report.deltas:
            told[delta.job_id].append(delta)
    assert lift.num_free_blocks == lift.num_blocks
    return told, reports


def outputs(deltas: list[TokenDelta]) -> dict[int, tuple[int, ...]]:
    return {
        index: tuple(token for delta in deltas if delta.choice == index for token in delta.token_ids)
        for index in {delta.choice for delta in deltas}
    }


def test_choices_share_a_prompt_and_end_each_by_itself() -> None:
    lift = engine(cache=False)
    sampling = SamplingParams(n=4, max_tokens=12)
    told, reports = ride(lift, request("job-1", sampling))
    made = outputs(told["job-1"])
    assert set(made) == {0, 1, 2, 3}
    assert len(set(made.values())) == 4
    # The prompt is computed once, and of the others only the last token, which yields their first one.
    assert sum(report.stats.num_prefill_tokens + report.stats.num_decode_tokens for report in reports) <= (
        len(PROMPT) + 3 + sum(map(len, made.values()))
    )
    ends = [report.ended for report in reports]
    assert ends == [*[()] * (len(ends) - 1), ("job-1",)]


def test_several_choices_in_one_step_are_deltas_of_one_report() -> None:
    _, reports = ride(engine(), request("job-1", SamplingParams(n=3, max_tokens=5, ignore_eos=True)))
    assert max(len(report.deltas) for report in reports) == 3
    assert all(report.stats.job_ids == ("job-1",) for report in reports)
    assert max(report.stats.num_sequences for report in reports) == 3


def test_the_first_choice_is_the_job_without_choices() -> None:
    one, _ = ride(engine(), request("job-1", SamplingParams(max_tokens=15)))
    many, _ = ride(engine(), request("job-1", SamplingParams(max_tokens=15, n=5)))
    assert outputs(many["job-1"])[0] == outputs(one["job-1"])[0]


@pytest.mark.parametrize("when", [0, 1, 2, 5])
def test_cancelling_takes_all_choices_along(when: int) -> None:
    lift = engine()
    lift.add(request("job-1", SamplingParams(n=4, max_tokens=30, ignore_eos=True)))
    for _ in range(when):
        lift.step(now_ms=0)
    assert lift.cancel("job-1")
    lift.check()
    assert not lift.has_work
    assert lift.num_free_blocks == lift.num_blocks


def test_a_choice_that_fails_takes_the_others_along() -> None:
    lift = engine()
    lift.add(request("job-1", SamplingParams(max_tokens=20, ignore_eos=True)))
    # The runner keeps its poison at -10,000: with this bias some choice draws it soon.
    lift.add(request("job-2", SamplingParams(n=3, max_tokens=30, logit_bias={POISON: 10_005.0})))
    failures: list[Failure] = []
    tokens = 0
    while (report := lift.step(now_ms=0)) is not None:
        lift.check()
        failures += report.failures
        tokens += sum(len(delta.token_ids) for delta in report.deltas if delta.job_id == "job-1")
    assert [failure.code for failure in failures] == ["numerics"]
    assert tokens == 20


@pytest.mark.parametrize("prompt_logprobs", [None, 3])
@pytest.mark.parametrize("n", [1, 3])
def test_no_output_is_a_defined_result(prompt_logprobs: int | None, n: int) -> None:
    sampling = SamplingParams(max_tokens=0, prompt_logprobs=prompt_logprobs, n=n)
    told, reports = ride(engine(), request("job-1", sampling))
    deltas = told["job-1"]
    assert [(delta.choice, delta.token_ids, delta.text, delta.finish_reason) for delta in deltas] == [
        (index, (), "", "length") for index in range(n)
    ]
    assert (deltas[0].prompt_logprobs is not None) == (prompt_logprobs is not None)
    assert sum(report.stats.num_sequences for report in reports) == (0 if prompt_logprobs is None else 1)
    assert reports[-1].ended == ("job-1",)


def test_missing_max_tokens_fills_the_context() -> None:
    runner = ContextRunner(vocab_size=VOCAB, context_tokens=30, num_blocks=64, block_size=BLOCK)
    lift = Engine(runner, byte_level(), EngineConfig())
    told, _ = ride(lift, request("job-1", SamplingParams(ignore_eos=True, n=2)))
    assert {len(tokens) for tokens in outputs(told["job-1"]).values()} == {30 - len(PROMPT)}


@pytest.mark.parametrize("chunk", [1, 5, 256])
def test_prompt_logprobs_do_not_come_out_of_a_cache(chunk: int) -> None:
    """The prompt is in the cache as a whole; its logprobs are all there and right nevertheless."""
    runner = ContextRunner(vocab_size=VOCAB)
    expected = (None, *(judge(row(runner, PROMPT[:i]), PROMPT[i], 4) for i in range(1, len(PROMPT))))
    lift = engine(chunk=chunk)
    warm = SamplingParams(max_tokens=8, temperature=0.0)
    asked = SamplingParams(max_tokens=8, temperature=0.0, prompt_logprobs=4)
    before, _ = ride(lift, request("job-1", warm))
    told, _ = ride(lift, request("job-2", asked))
    after, _ = ride(lift, request("job-3", warm))
    heard = [delta.prompt_logprobs for delta in told["job-2"]]
    assert heard[0] is not None
    assert all(later is None for later in heard[1:])
    assert_close(heard[0], expected)
    assert told["job-2"][0].cached_tokens == 0
    assert after["job-3"][0].cached_tokens == len(PROMPT) - 1
    assert outputs(before["job-1"]) == outputs(told["job-2"]) == outputs(after["job-3"])


def row(runner: ContextRunner, context: tuple[int, ...]) -> list[float]:
    logits: list[float] = runner._logits(list(context)).tolist()
    return logits


def assert_close(ours: tuple[TokenLogprobs | None, ...], theirs: tuple[TokenLogprobs | None, ...]) -> None:
    assert len(ours) == len(theirs)
    for a, b in zip(ours[1:], theirs[1:], strict=True):
        assert a is not None
        assert b is not None
        assert a.rank == b.rank
        assert a.logprob == pytest.approx(b.logprob, abs=1e-4)
        assert [token for token, _ in a.top] == [token for token, _ in b.top]


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(repetition_penalty=1.7, max_tokens=20, temperature=0.0, ignore_eos=True),
        SamplingParams(presence_penalty=1.5, frequency_penalty=0.7, max_tokens=20, ignore_eos=True),
    ],
)
def test_penalties_are_the_same_with_a_cached_prompt(sampling: SamplingParams) -> None:
    first = request("job-1", sampling)
    cold, _ = ride(engine(cache=False), first)
    lift = engine()
    one, _ = ride(lift, first)
    two, _ = ride(lift, first._replace(job_id="job-2", order=2))
    assert two["job-2"][0].cached_tokens == len(PROMPT) - 1
    assert outputs(cold["job-1"]) == outputs(one["job-1"]) == outputs(two["job-2"])
    plain, _ = ride(
        engine(), request("job-1", SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True))
    )
    assert outputs(plain["job-1"]) != outputs(cold["job-1"])


def test_a_huge_repetition_penalty_never_repeats() -> None:
    sampling = SamplingParams(repetition_penalty=100.0, temperature=0.0, max_tokens=12, ignore_eos=True)
    told, _ = ride(engine(), request("job-1", sampling))
    made = outputs(told["job-1"])[0]
    assert len(set(made)) == len(made)


def test_logprobs_are_of_the_model_and_not_of_what_the_job_made_of_it() -> None:
    plain = SamplingParams(max_tokens=1, temperature=0.0, logprobs=5)
    bent = SamplingParams(
        max_tokens=1, temperature=0.0, logprobs=5, logit_bias={40: 50.0}, repetition_penalty=2.0, top_k=1
    )
    told, _ = ride(engine(), request("job-1", plain), request("job-2", bent))
    (one,), (two,) = told["job-1"], told["job-2"]
    assert one.logprobs[0].top == two.logprobs[0].top
    assert two.token_ids == (40,)
    assert two.logprobs[0].rank > 1
    assert one.logprobs[0].top[0] == (one.token_ids[0], one.logprobs[0].logprob)


def test_ties_in_logprobs_go_to_the_lower_id() -> None:
    (entry,) = token_logprobs(torch.zeros(1, 50), [3], 4)
    assert [token for token, _ in entry.top] == [0, 1, 2, 3]
    assert entry.rank == 4
    (all_of_them,) = token_logprobs(torch.zeros(1, 5), [0], 20)
    assert len(all_of_them.top) == 5


def test_bad_words_never_come_to_stand_in_the_output() -> None:
    free = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)
    told, _ = ride(engine(), request("job-1", free))
    made = outputs(told["job-1"])[0]
    words = ((made[3],), made[5:7], made[10:13])
    banned = request("job-2", free)._replace(bad_words=words)
    told, _ = ride(engine(), banned)
    kept = outputs(told["job-2"])[0]
    assert kept[0] == made[0]
    assert kept != made
    for word in words:
        assert all(kept[i : i + len(word)] != word for i in range(len(kept)))


def test_bans_that_leave_nothing_fail_that_job_alone() -> None:
    neighbour = request("job-1", SamplingParams(max_tokens=20, ignore_eos=True))
    alone, _ = ride(engine(), neighbour)
    stuck = request("job-2", SamplingParams(allowed_token_ids=(7, 8), max_tokens=20, n=2))
    stuck = stuck._replace(bad_words=((7, 8), (7, 7), (8, 7), (8, 8)))
    lift = engine()
    lift.add(neighbour)
    lift.add(stuck)
    failures: list[Failure] = []
    tokens: list[int] = []
    while (report := lift.step(now_ms=0)) is not None:
        lift.check()
        failures += report.failures
        tokens += [token for delta in report.deltas if delta.job_id == "job-1" for token in delta.token_ids]
    assert [(failure.job_id, failure.code) for failure in failures] == [("job-2", "invalid")]
    assert failures[0].message == "no token is allowed to be output token 1"
    assert tuple(tokens) == outputs(alone["job-1"])[0]


@pytest.mark.parametrize(
    ("sampling", "message"),
    [
        (
            SamplingParams(logit_bias={VOCAB: 1.0}),
            f"token id {VOCAB} in logit_bias is outside the vocabulary of 64",
        ),
        (SamplingParams(banned_token_ids=(VOCAB,)), "in banned_token_ids is outside the vocabulary of 64"),
        (SamplingParams(allowed_token_ids=(99,)), "token id 99 in allowed_token_ids is outside"),
        (SamplingParams(allowed_token_ids=(7,), banned_token_ids=(7,)), "leave none of 64 tokens"),
        (SamplingParams(banned_token_ids=tuple(range(VOCAB))), "leave none of 64 tokens"),
        (
            SamplingParams(allowed_token_ids=(EOS,), min_tokens=1),
            "every token that may be drawn ends the job",
        ),
        (SamplingParams(typical_p=0.0), "typical_p is 0.0"),
        (SamplingParams(repetition_penalty=0.0), "repetition_penalty is 0.0"),
        (SamplingParams(frequency_penalty=float("nan")), "must be finite"),
        (SamplingParams(n=0), "n is 0"),
        (SamplingParams(n=3, best_of=2), "n is 3 and best_of 2"),
    ],
)
def test_what_can_never_run_is_refused(sampling: SamplingParams, message: str) -> None:
    lift = engine()
    with pytest.raises(InvalidJob, match=message):
        lift.add(request("job-1", sampling))
    assert not lift.has_work


def test_prompt_logprobs_are_bounded() -> None:
    runner = ContextRunner(vocab_size=VOCAB, context_tokens=20_000, num_blocks=8000, block_size=BLOCK)
    lift = Engine(runner, byte_level(), EngineConfig())
    sampling = SamplingParams(max_tokens=1, prompt_logprobs=20)
    with pytest.raises(InvalidJob, match="20 of 12484 prompt tokens make 262164 numbers; at most 262144"):
        lift.add(request("job-1", sampling, (5,) * 12_484))


def test_prompt_logits_that_are_not_finite_fail_the_job() -> None:
    lift = engine()
    lift.add(request("job-1", SamplingParams(max_tokens=1, prompt_logprobs=0), (5, 6, POISON, 7)))
    report = lift.step(now_ms=0)
    assert report is not None
    (failure,) = report.failures
    assert (failure.code, failure.message) == ("numerics", "logits of prompt token 2 are not finite")
    lift.check()
    assert lift.num_free_blocks == lift.num_blocks
