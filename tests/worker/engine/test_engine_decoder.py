"""The engine with the real decoder and the tiny trained model: prompts to text."""

from __future__ import annotations

import random

import pytest
import torch

from chairlift_client.protocol import SamplingParams
from chairlift_worker.engine.engine import Engine
from chairlift_worker.engine.request import EngineConfig, EngineRequest, StepReport
from chairlift_worker.models.decoder import DecoderRunner
from engine_runs import expect_short_outputs, run
from tiny_model import TINY_MODEL, load_prompts
from tokenizer_kinds import byte_level


def load(num_blocks: int) -> DecoderRunner:
    """In double precision, where the order of summation decides no token."""
    return DecoderRunner.load(
        TINY_MODEL, num_blocks=num_blocks, block_size=8, dtype=torch.float64, device=torch.device("cpu")
    )


@pytest.fixture(scope="module")
def requests() -> list[EngineRequest]:
    samplings = [
        SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True),
        SamplingParams(temperature=0.9, top_p=0.95, max_tokens=30),
        SamplingParams(temperature=1.2, top_k=40, max_tokens=24, min_tokens=12, stop=("e", "ı")),
    ]
    texts = [prompt.prompt or prompt.chat()[-1]["content"] for prompt in load_prompts()[:20]]
    return [
        EngineRequest(
            job_id=f"job-{order}",
            prompt_token_ids=tuple(byte_level().encode(text, add_special_tokens=False).ids[:60]),
            sampling=samplings[order % len(samplings)],
            seed=order * 7919,
            order=order,
        )
        for order, text in enumerate(texts)
    ]


def test_a_crowd_changes_no_text(requests: list[EngineRequest]) -> None:
    """A pool with preemption, odd chunks and another order against each job alone."""
    roomy = Engine(load(64), byte_level(), EngineConfig())
    alone = {request.job_id: run(roomy, [request])[request.job_id].end for request in requests}
    shuffled = list(requests)
    random.Random(1).shuffle(shuffled)
    shuffled = [request._replace(order=order) for order, request in enumerate(shuffled)]
    reports: list[StepReport] = []
    crowded = expect_short_outputs(Engine(load(20), byte_level(), EngineConfig(8, 23, 11)))
    told = run(crowded, shuffled, on_step=reports.append)
    assert {job_id: answer.end for job_id, answer in told.items()} == alone
    assert reports[-1].stats.num_preemptions > 0
    assert max(report.stats.num_sequences for report in reports) > 2


def test_resumed_jobs_continue_the_text(requests: list[EngineRequest]) -> None:
    lift = Engine(load(64), byte_level(), EngineConfig())
    chance = random.Random(2)
    whole = run(lift, requests)
    resumed = []
    for request in requests:
        tokens = whole[request.job_id].token_ids
        resumed.append(request._replace(logged_token_ids=tuple(tokens[: chance.randint(0, len(tokens))])))
    rest = run(lift, resumed)
    for request in resumed:
        before, after = whole[request.job_id], rest[request.job_id]
        num_logged = len(request.logged_token_ids)
        assert after.token_ids == before.token_ids[num_logged:]
        assert after.text == "".join(before.texts[num_logged:])
