"""The engine with a real decoder and adapters: preempted, in chunks, from the cache, in any company."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from chairlift_client.protocol import SamplingParams
from chairlift_worker.engine.engine import Engine
from chairlift_worker.engine.request import EngineConfig, EngineRequest, StepReport
from chairlift_worker.models.decoder import DecoderRunner
from chairlift_worker.models.lora_weights import LoraWeights
from chairlift_worker.models.tokenizer import ChatTokenizer
from engine_runs import expect_short_outputs, run
from lora_adapters import save_random_adapter
from tiny_model import TINY_MODEL

BLOCK_SIZE = 8


@pytest.fixture
def rng() -> random.Random:
    seed = random.randrange(2**32)
    print("seed", seed)
    return random.Random(seed)


def load(num_blocks: int) -> DecoderRunner:
    return DecoderRunner.load(
        TINY_MODEL,
        num_blocks=num_blocks,
        block_size=BLOCK_SIZE,
        dtype=torch.float32,
        device=torch.device("cpu"),
        exact=True,
    )


def make_engine(runner: DecoderRunner, **fields: Any) -> Engine:
    tokenizer = ChatTokenizer.load(TINY_MODEL, vocab_size=runner.spec.vocab_size)
    return Engine(runner, tokenizer, EngineConfig(**fields), fingerprint="tiny")


@pytest.fixture
def adapters(tmp_path: Path) -> list[LoraWeights | None]:
    runner = load(1)
    folders = [save_random_adapter(TINY_MODEL, tmp_path / f"{seed}", seed=seed) for seed in range(3)]
    return [None, *(runner.load_adapter(folder, max_rank=8) for folder in folders)]


def make_request(
    index: int, prompt: list[int], adapter: LoraWeights | None, num_tokens: int = 30
) -> EngineRequest:
    return EngineRequest(
        job_id=f"job {index}",
        prompt_token_ids=tuple(prompt),
        sampling=SamplingParams(
            max_tokens=num_tokens, temperature=index % 2 * 0.8, ignore_eos=True, logprobs=2, prompt_logprobs=1
        ),
        seed=index,
        order=index,
        adapter=adapter,
    )


def test_a_crowd_is_each_alone_to_the_last_bit(
    adapters: list[LoraWeights | None], rng: random.Random
) -> None:
    prompts = [[rng.randrange(3, 640) for _ in range(rng.choice((3, 20, 45)))] for _ in range(12)]
    requests = [make_request(index, prompt, adapters[index % 4]) for index, prompt in enumerate(prompts)]
    num_preemptions = 0
    logprobs: dict[str, list[object]] = {request.job_id: [] for request in requests}

    def look(report: StepReport) -> None:
        nonlocal num_preemptions
        num_preemptions = report.stats.num_preemptions
        for delta in report.deltas:
            logprobs[delta.job_id] += delta.logprobs
            if delta.prompt_logprobs is not None:
                logprobs[delta.job_id].append(delta.prompt_logprobs)

    crowd = make_engine(load(24), max_num_seqs=8, max_step_tokens=16, max_chunk_tokens=7)
    together = run(expect_short_outputs(crowd), requests, on_step=look)
    assert num_preemptions > 0
    in_company = {job_id: list(told) for job_id, told in logprobs.items()}
    roomy = load(64)
    for request in requests:
        logprobs[request.job_id].clear()
        alone = run(make_engine(roomy, max_num_seqs=1), [request], on_step=look)
        assert alone[request.job_id].token_ids == together[request.job_id].token_ids
        assert logprobs[request.job_id] == in_company[request.job_id]


def test_blocks_are_shared_within_an_adapter_and_never_beyond_it(
    adapters: list[LoraWeights | None], tmp_path: Path, rng: random.Random
) -> None:
    prompt = [rng.randrange(3, 640) for _ in range(40)]
    runner = load(64)
    engine = make_engine(runner)
    twin = runner.load_adapter(save_random_adapter(TINY_MODEL, tmp_path / "twin", seed=2), max_rank=8)
    asked = [*adapters, *adapters, twin]
    found, texts = [], []
    for index, adapter in enumerate(asked):
        request = make_request(2 * index, prompt, adapter, num_tokens=8)
        request = request._replace(sampling=SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True))
        told = run(engine, [request])[request.job_id]
        assert told.end is not None
        found.append(told.end.cached_tokens)
        texts.append(tuple(told.token_ids))
    assert found == [0] * 4 + [39] * 5
    assert texts[:4] == texts[4:8]
    assert texts[8] == texts[3]
    assert len(set(texts)) == 4
