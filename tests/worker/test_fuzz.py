"""Random jobs in random company against the slow oracle: no difference in anything that a job is told.

Lengths, sampling, stops, choices, logprobs, priorities, cancels, a cache that is on or off, pools so small
that jobs are preempted, and jobs that are resumed in the middle.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from functools import cache
from math import isclose
from typing import Any, NamedTuple

import pytest
from msgspec.structs import replace

from chairlift_client.protocol import JOB_CLASSES, SamplingParams, TokenLogprobs
from chairlift_worker.engine.engine import Engine
from chairlift_worker.engine.request import EngineConfig, EngineRequest, TokenDelta
from context_runner import EOS, POISON, ContextRunner
from engine_runs import expect_short_outputs
from job_oracle import ExpectedChoice, expected_choice, expected_prompt_logprobs
from tokenizer_kinds import byte_level

VOCAB = 128
CONTEXT = 80
JOBS_IN_A_ROUND = 20
TIE = 1e-5
"""Scores with noise reach 40, where float32 has steps of 4e-6."""


@dataclass
class Heard:
    """What the service is told of one choice."""

    token_ids: list[int] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    end: TokenDelta | None = None


class Round:
    """One engine and the jobs that ride in it."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        block_size = self.chance.choice((1, 2, 4, 7))
        num_blocks = -(-CONTEXT // block_size) + self.chance.randint(0, 40 // block_size)
        self.runner = ContextRunner(
            vocab_size=VOCAB, context_tokens=CONTEXT, num_blocks=num_blocks, block_size=block_size
        )
        seqs = self.chance.randint(1, 12)
        self.config = EngineConfig(
            max_num_seqs=seqs,
            max_step_tokens=seqs + self.chance.randint(0, 40),
            max_chunk_tokens=self.chance.randint(1, 40),
            max_preemptions=self.chance.randint(0, 3),
            prefix_cache=self.chance.random() < 0.8,
        )
        self.engine = Engine(self.runner, byte_level(), self.config)
        if self.chance.random() < 0.7:
            expect_short_outputs(self.engine)
        self.prompts = [self._tokens(self.chance.randint(1, 40)) for _ in range(4)]
        self.heard: dict[str, dict[int, Heard]] = {}
        self.prompt_logprobs: dict[str, tuple[TokenLogprobs | None, ...]] = {}
        self.ended: set[str] = set()

    def request(self, number: int) -> EngineRequest:
        """A random job; prompts often begin alike."""
        chance = self.chance
        prompt = chance.choice(self.prompts)[: chance.randint(1, 40)] + self._tokens(chance.randint(0, 8))
        sampling = self._sampling(len(prompt))
        bad_words: tuple[tuple[int, ...], ...] = ()
        if chance.random() < 0.15:  # of the few tokens that may be drawn, so that the words really occur
            few = self._tokens(16)
            sampling = replace(sampling, allowed_token_ids=few, top_k=0, ignore_eos=True, stop_token_ids=())
            bad_words = tuple(tuple(chance.choices(few, k=chance.randint(1, 3))) for _ in range(9))
        return EngineRequest(
            job_id=f"job-{number}",
            prompt_token_ids=prompt,
            sampling=sampling,
            seed=chance.getrandbits(63),
            order=number,
            job_class=chance.choice(JOB_CLASSES),
            cache=chance.random() < 0.8,
            bad_words=bad_words,
        )

    def _tokens(self, count: int) -> tuple[int, ...]:
        return tuple(self.chance.randrange(2, VOCAB) for _ in range(count))

    def _sampling(self, num_prompt: int) -> SamplingParams:
        chance = self.chance
        max_tokens = chance.choice((None, 0, 1, *[chance.randint(1, 30)] * 6))
        if max_tokens is not None:
            max_tokens = min(max_tokens, CONTEXT - num_prompt)

        def sometimes(usual: Any, other: Any, probability: float = 0.25) -> Any:
            return other if chance.random() < probability else usual

        return SamplingParams(
            max_tokens=max_tokens,
            min_tokens=sometimes(0, chance.randint(0, min(8, 8 if max_tokens is None else max_tokens))),
            n=chance.choice((1, 1, 1, 2, 4)),
            temperature=chance.choice((0.0, 0.3, 1.0, 1.0, 1.8)),
            top_k=sometimes(0, chance.randint(1, 40)),
            top_p=sometimes(1.0, chance.uniform(0.1, 0.99)),
            min_p=sometimes(0.0, chance.uniform(0.001, 0.5)),
            typical_p=sometimes(1.0, chance.uniform(0.2, 0.99)),
            repetition_penalty=sometimes(1.0, chance.uniform(0.7, 1.6)),
            presence_penalty=sometimes(0.0, chance.uniform(-1, 1)),
            frequency_penalty=sometimes(0.0, chance.uniform(-0.5, 1)),
            logit_bias=sometimes({}, {chance.randrange(2, VOCAB): chance.uniform(-9, 9) for _ in range(4)}),
            allowed_token_ids=sometimes(None, tuple(chance.sample(range(2, VOCAB), 60)), 0.1),
            banned_token_ids=sometimes((), self._tokens(5)),
            stop=sometimes((), tuple(chance.sample(("e", "A", "!", "0", "ab", "£"), 2))),
            stop_token_ids=sometimes((), self._tokens(3)),
            ignore_eos=sometimes(False, True),
            include_stop=sometimes(False, True),
            skip_special_tokens=sometimes(True, False),
            logprobs=sometimes(None, chance.randint(0, 20), 0.3),
            prompt_logprobs=sometimes(None, chance.randint(0, 20), 0.2),
        )

    def ride(self, requests: list[EngineRequest], *, may_cancel: bool) -> None:
        """Let them board bit by bit, cancel some, and step to the end with the books checked."""
        waiting = list(requests)
        on_board: list[str] = []
        for request in requests:
            self.heard[request.job_id] = {}
        while waiting or self.engine.has_work:
            while waiting and (self.chance.random() < 0.5 or not self.engine.has_work):
                request = waiting.pop(0)
                self.engine.add(request)
                on_board.append(request.job_id)
            if may_cancel and on_board and self.chance.random() < 0.02:
                self._cancel(self.chance.choice(on_board))
            self._step()
        assert self.engine.num_free_blocks == self.engine.num_blocks

    def _cancel(self, job_id: str) -> None:
        if self.engine.cancel(job_id):
            self.heard.pop(job_id)
            self.engine.check()

    def _step(self) -> None:
        report = self.engine.step(now_ms=0)
        self.engine.check()
        if report is None:
            return
        assert not report.failures
        for delta in report.deltas:
            choice = self.heard[delta.job_id].setdefault(delta.choice, Heard())
            assert choice.end is None
            choice.token_ids.extend(delta.token_ids)
            choice.texts.append(delta.text)
            choice.logprobs.extend(delta.logprobs)
            if delta.finish_reason is not None:
                choice.end = delta
            if delta.prompt_logprobs is not None:
                assert delta.job_id not in self.prompt_logprobs
                self.prompt_logprobs[delta.job_id] = delta.prompt_logprobs
        self.ended.update(report.ended)

    @property
    def num_preemptions(self) -> int:
        """Since the round began."""
        return self.engine._scheduler.num_preemptions

    def logits_of(self, context: list[int]) -> list[float]:
        """The runner's logits, with no cache in between."""
        return list(_logits(self.runner.spec.vocab_size, tuple(context)))

    def expected(self, request: EngineRequest) -> list[ExpectedChoice]:
        """What the oracle says of every choice."""
        return [
            expected_choice(request, index, self.runner.spec, self.logits_of, _decode)
            for index in range(request.sampling.num_choices)
        ]


@cache
def _logits(vocab_size: int, context: tuple[int, ...]) -> tuple[float, ...]:
    return tuple(ContextRunner(vocab_size=vocab_size)._logits(list(context)).tolist())


def _decode(token_ids: list[int], skip_special_tokens: bool) -> str:
    return byte_level().decode(token_ids, skip_special_tokens=skip_special_tokens)


def differences(
    heard: dict[int, Heard], expected: list[ExpectedChoice], logged: list[int] | None = None
) -> list[str]:
    """All in which the choices differ from the oracle's; the first `logged` tokens are not told again."""
    found: list[str] = []
    for index, choice in enumerate(expected):
        told, skipped = heard.get(index, Heard()), 0 if logged is None else logged[index]
        found += [
            f"choice {index}: {what}: {ours} against {theirs}"
            for what, ours, theirs in (
                ("tokens", told.token_ids, choice.token_ids[skipped:]),
                ("finish", told.end and told.end.finish_reason, choice.finish_reason),
                ("stop", told.end and told.end.stop_reason, choice.stop_reason),
                ("whole text", told.end and told.end.full_text, choice.text),
                ("usage", told.end and told.end.output_tokens, len(choice.token_ids)),
            )
            if ours != theirs
        ]
        joined = "".join(told.texts)
        if joined != choice.text if logged is None else not choice.text.endswith(joined):
            found.append(f"choice {index}: joined text {joined!r} against {choice.text!r}")
        if not alike(told.logprobs, choice.logprobs[skipped:]):
            found.append(f"choice {index}: logprobs")
    return found


def alike(
    ours: list[TokenLogprobs] | tuple[TokenLogprobs | None, ...] | None,
    theirs: list[TokenLogprobs] | tuple[TokenLogprobs | None, ...] | None,
) -> bool:
    """Equal logprobs to 1e-4, ranks and tops."""
    if ours is None or theirs is None:
        return ours is theirs
    return len(ours) == len(theirs) and all(_alike(a, b) for a, b in zip(ours, theirs, strict=True))


def _alike(a: TokenLogprobs | None, b: TokenLogprobs | None) -> bool:
    if a is None or b is None:
        return a is b
    pairs = [(a.logprob, b.logprob), *((x[1], y[1]) for x, y in zip(a.top, b.top, strict=False))]
    close = all(isclose(x, y, rel_tol=0, abs_tol=1e-4) for x, y in pairs)
    return close and a.rank == b.rank and [t for t, _ in a.top] == [t for t, _ in b.top]


def is_tied(heard: dict[int, Heard], expected: list[ExpectedChoice]) -> bool:
    """Whether some choice parted from the oracle where float32 cannot tell the two best tokens apart."""
    for index, choice in enumerate(expected):
        ours = heard.get(index, Heard()).token_ids
        parted = next(
            (i for i, (a, b) in enumerate(zip(ours, choice.token_ids, strict=False)) if a != b), None
        )
        if parted is not None and choice.leads[parted]() < TIE:
            return True
    return False


class Checked(NamedTuple):
    """What was held against the oracle, and what could not be for a tie."""

    num_jobs: int
    num_ties: int


def check_round(seed: int) -> Checked:
    """All jobs of one engine."""
    rides = Round(seed)
    requests = [rides.request(number) for number in range(JOBS_IN_A_ROUND)]
    rides.ride(requests, may_cancel=True)
    ridden = [request for request in requests if request.job_id in rides.heard]
    assert {request.job_id for request in ridden} <= rides.ended
    expected = {request.job_id: rides.expected(request) for request in ridden}
    kept = [
        request for request in ridden if not is_tied(rides.heard[request.job_id], expected[request.job_id])
    ]
    for request in kept:
        found = differences(rides.heard[request.job_id], expected[request.job_id])
        if not alike(
            rides.prompt_logprobs.get(request.job_id), expected_prompt_logprobs(request, rides.logits_of)
        ):
            found.append("prompt logprobs")
        assert not found, (seed, request, found)
    resume(rides, kept, expected)
    return Checked(len(kept), len(ridden) - len(kept))


def resume(rides: Round, kept: list[EngineRequest], expected: dict[str, list[ExpectedChoice]]) -> None:
    """Ride again from a random point of each job's log."""
    cuts = {
        request.job_id: [
            rides.chance.randint(0, len(choice.token_ids)) for choice in expected[request.job_id]
        ]
        for request in kept
    }
    resumed = [_resumed(request, expected[request.job_id], cuts[request.job_id]) for request in kept]
    rides.ride(resumed, may_cancel=False)
    for request in resumed:
        job_id = request.job_id.removesuffix("+")
        heard, cut = rides.heard[request.job_id], cuts[job_id]
        # A choice whose log is complete is told of again only where the whole job's is.
        for index, choice in enumerate(expected[job_id]):
            if cut[index] == len(choice.token_ids) and index not in heard:
                end = TokenDelta(
                    job_id, 0, (), "", choice.finish_reason, choice.stop_reason, 0, cut[index], choice.text
                )
                heard[index] = Heard(end=end)
        found = differences(heard, expected[job_id], cut)
        assert not found, (request, cut, found)


def _resumed(request: EngineRequest, expected: list[ExpectedChoice], cut: list[int]) -> EngineRequest:
    first, *more = (tuple(choice.token_ids[:end]) for choice, end in zip(expected, cut, strict=True))
    return request._replace(
        job_id=f"{request.job_id}+",
        logged_token_ids=first,
        more_logged_token_ids=tuple(more),
        prompt_is_told=any(cut),
    )


@pytest.mark.parametrize("seed", range(5))
def test_100_random_jobs(seed: int) -> None:
    print(f"seed {seed}")
    checked = check_round(seed)
    print(f"{checked.num_jobs} jobs, {checked.num_ties} ties")
    assert checked.num_jobs > 0


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_2000_random_jobs() -> None:
    seed, num_jobs, num_ties = 1_000, 0, 0
    while num_jobs < 2_000:
        checked = check_round(seed)
        num_jobs, num_ties = num_jobs + checked.num_jobs, num_ties + checked.num_ties
        _logits.cache_clear()
        seed += 1
    print(f"seeds 1000 to {seed - 1}: {num_jobs} jobs, no difference, {num_ties} more with a tie")
    assert num_ties < 5


def test_the_oracle_knows_the_ends_of_the_runner() -> None:
    assert EOS not in range(2, VOCAB)
    assert POISON not in range(2, VOCAB)
