"""Logprobs and penalties of real models against transformers, in batches, chunked and preempted."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from chairlift_client.protocol import SamplingParams, TokenLogprobs
from chairlift_worker.engine.engine import Engine
from chairlift_worker.engine.request import EngineConfig, EngineRequest, TokenDelta
from chairlift_worker.engine.runner import Runner
from chairlift_worker.models.decoder import DecoderRunner
from chairlift_worker.models.fallback import FallbackRunner
from engine_runs import expect_short_outputs
from sampling_oracle import adjusted, judge
from tiny_model import TINY_MODEL, load_prompts
from tokenizer_kinds import byte_level

NUM_TOP = 5
SAMPLING = SamplingParams(
    temperature=0.0,
    repetition_penalty=1.3,
    presence_penalty=0.4,
    frequency_penalty=0.3,
    max_tokens=24,
    ignore_eos=True,
    logprobs=NUM_TOP,
    prompt_logprobs=NUM_TOP,
)


@pytest.fixture(scope="module")
def oracle() -> Any:
    return AutoModelForCausalLM.from_pretrained(TINY_MODEL, dtype=torch.float64, attn_implementation="eager")


@pytest.fixture(params=[DecoderRunner, FallbackRunner])
def runner(request: pytest.FixtureRequest) -> Runner:
    runner: Runner = request.param.load(
        TINY_MODEL, num_blocks=14, block_size=8, dtype=torch.float32, device=torch.device("cpu")
    )
    return runner


def requests() -> list[EngineRequest]:
    texts = [prompt.prompt or prompt.chat()[-1]["content"] for prompt in load_prompts()[:8]]
    prompts = [tuple(byte_level().encode(text, add_special_tokens=False).ids[:40]) for text in texts]
    return [EngineRequest(f"job-{i}", prompt, SAMPLING, i, order=i) for i, prompt in enumerate(prompts)]


def test_what_is_told_of_tokens_is_what_transformers_thinks(runner: Runner, oracle: Any) -> None:
    lift = expect_short_outputs(Engine(runner, byte_level(), EngineConfig(6, 19, 13)))
    told: dict[str, list[TokenDelta]] = {}
    num_preemptions = 0
    for request in requests():
        lift.add(request)
    while (report := lift.step(now_ms=0)) is not None:
        lift.check()
        num_preemptions = report.stats.num_preemptions
        for delta in report.deltas:
            told.setdefault(delta.job_id, []).append(delta)
    assert num_preemptions > 0
    for request in requests():
        deltas = told[request.job_id]
        output = [token for delta in deltas for token in delta.token_ids]
        prompt_logprobs = deltas[0].prompt_logprobs
        assert prompt_logprobs is not None
        assert prompt_logprobs[0] is None
        ours = [*prompt_logprobs[1:], *(entry for delta in deltas for entry in delta.logprobs)]
        check_text(oracle, list(request.prompt_token_ids), output, ours)


def check_text(oracle: Any, prompt: list[int], output: list[int], ours: list[TokenLogprobs | None]) -> None:
    text = [*prompt, *output]
    with torch.no_grad():
        rows: list[list[float]] = oracle(torch.tensor([text])).logits[0].tolist()
    assert len(ours) == len(text) - 1
    for position, entry in enumerate(ours):
        assert entry is not None
        theirs = judge(rows[position], text[position + 1], NUM_TOP)
        assert entry.logprob == pytest.approx(theirs.logprob, abs=1e-4)
        assert [value for _, value in entry.top] == pytest.approx(
            [value for _, value in theirs.top], abs=1e-4
        )
    for place, token_id in enumerate(output):
        row = adjusted(rows[len(prompt) + place - 1], SAMPLING, prompt, output[:place], ())
        assert row[token_id] > max(row) - 1e-4, place
