"""What can never run is refused on arrival, with both numbers, and leaves nothing behind."""

from __future__ import annotations

import math

import pytest

from chairlift_client.errors import InvalidJob
from chairlift_client.protocol import SamplingParams
from chairlift_worker.engine.engine import Engine
from chairlift_worker.engine.request import EngineConfig, EngineRequest
from context_runner import EOS, ContextRunner
from engine_runs import run
from tokenizer_kinds import byte_level

CONTEXT = 40
VOCAB = 64


def engine(num_blocks: int = 64, block_size: int = 4) -> Engine:
    runner = ContextRunner(
        vocab_size=VOCAB, context_tokens=CONTEXT, num_blocks=num_blocks, block_size=block_size
    )
    return Engine(runner, byte_level(), EngineConfig())


def request(num_prompt: int, sampling: SamplingParams, logged: tuple[int, ...] = ()) -> EngineRequest:
    return EngineRequest("job", (5,) * num_prompt, sampling, seed=1, logged_token_ids=logged)


def refusal(refusing: Engine, bad: EngineRequest) -> str:
    with pytest.raises(InvalidJob) as refused:
        refusing.add(bad)
    assert not refusing.has_work
    assert refusing.num_free_blocks == refusing.num_blocks
    return str(refused.value)


def limited(max_tokens: int | None) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True)


def test_an_empty_prompt() -> None:
    assert "0 tokens" in refusal(engine(), request(0, limited(5)))


@pytest.mark.parametrize("num_prompt", [CONTEXT, CONTEXT + 1])
def test_a_prompt_that_leaves_no_room_for_output(num_prompt: int) -> None:
    message = refusal(engine(), request(num_prompt, limited(None)))
    assert str(num_prompt) in message
    assert str(CONTEXT) in message


def test_the_longest_prompt_gives_one_token() -> None:
    for max_tokens in (1, None):
        told = run(engine(), [request(CONTEXT - 1, limited(max_tokens))])["job"]
        assert len(told.token_ids) == 1
        assert told.end is not None
        assert told.end.finish_reason == "length"


def test_prompt_and_output_may_fill_the_context_exactly() -> None:
    told = run(engine(), [request(10, limited(CONTEXT - 10))])["job"]
    assert len(told.token_ids) == CONTEXT - 10
    message = refusal(engine(), request(10, limited(CONTEXT - 9)))
    assert str(CONTEXT + 1) in message
    assert str(CONTEXT) in message


def test_without_max_tokens_the_context_is_filled() -> None:
    assert len(run(engine(), [request(10, limited(None))])["job"].token_ids) == CONTEXT - 10


def test_more_than_the_pool_holds() -> None:
    """5 blocks of 4: 20 slots, so 21 tokens, as the last one is never computed."""
    assert len(run(engine(5), [request(11, limited(10))])["job"].token_ids) == 10
    message = refusal(engine(5), request(11, limited(11)))
    assert "22" in message
    assert "21" in message
    for max_tokens in (1, None):
        message = refusal(engine(5), request(21, limited(max_tokens)))
        assert "21" in message
        assert "20" in message


def test_without_max_tokens_the_pool_is_filled() -> None:
    told = run(engine(5), [request(11, limited(None))])["job"]
    assert len(told.token_ids) == 10
    assert told.end is not None
    assert told.end.finish_reason == "length"
    assert len(run(engine(5), [request(20, limited(None))])["job"].token_ids) == 1


@pytest.mark.parametrize("bad_id", [-1, VOCAB, 2**40])
def test_ids_outside_the_vocabulary(bad_id: int) -> None:
    plain = limited(5)
    cases = {
        "prompt": request(3, plain)._replace(prompt_token_ids=(1, bad_id)),
        "logged": request(3, plain, logged=(bad_id,)),
        "stop_token_ids": request(3, SamplingParams(max_tokens=5, stop_token_ids=(bad_id,))),
    }
    for where, bad in cases.items():
        message = refusal(engine(), bad)
        assert where in message
        assert str(bad_id) in message
        assert str(VOCAB) in message


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(max_tokens=-3),
        SamplingParams(temperature=math.nan),
        SamplingParams(temperature=math.inf),
        SamplingParams(temperature=-1.0),
        SamplingParams(top_p=0.0),
        SamplingParams(top_p=1.5),
        SamplingParams(top_p=math.nan),
        SamplingParams(min_p=1.01),
        SamplingParams(min_p=math.nan),
        SamplingParams(top_k=-1),
        SamplingParams(min_tokens=-1),
        SamplingParams(min_tokens=1, stop_token_ids=tuple(range(VOCAB))),
    ],
)
def test_sampling_out_of_range(sampling: SamplingParams) -> None:
    refusal(engine(), request(3, sampling))


def test_a_log_longer_than_the_job() -> None:
    message = refusal(engine(), request(3, limited(4), logged=(5,) * 5))
    assert "5" in message
    assert "4" in message
    message = refusal(engine(), request(3, SamplingParams(max_tokens=4), logged=(5, EOS, 5)))
    assert "3" in message
    assert "2" in message


def test_a_job_that_is_on_board_already() -> None:
    busy = engine()
    busy.add(request(3, limited(4)))
    with pytest.raises(InvalidJob, match="on board"):
        busy.add(request(3, limited(4)))


def test_a_refused_job_does_not_touch_its_neighbours() -> None:
    neighbour = request(7, SamplingParams(max_tokens=20))._replace(job_id="neighbour")
    alone = run(engine(), [neighbour])["neighbour"]
    busy = engine()
    busy.add(neighbour)
    report = busy.step(now_ms=0)
    assert report is not None
    tokens = [token for delta in report.deltas for token in delta.token_ids]
    with pytest.raises(InvalidJob):
        busy.add(request(0, limited(5)))
    while (report := busy.step(now_ms=0)) is not None:
        tokens += [token for delta in report.deltas for token in delta.token_ids]
    assert tokens == alone.token_ids
