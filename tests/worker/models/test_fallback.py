"""Every family on pages, in ragged steps, against its own plain forward and `generate`."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from chairlift_worker.engine.batch import Chunk
from chairlift_worker.models.fallback import FallbackRunner
from ragged_driver import RaggedDriver
from random_models import CONTEXT_TOKENS, FAMILIES, VOCAB_SIZE, save_random_model

CPU = torch.device("cpu")
BLOCK_SIZE, NUM_BLOCKS = 4, 36
LENGTHS = (29, 17, 6, 1)
NUM_NEW_TOKENS = 7


@pytest.fixture(scope="module", params=sorted(FAMILIES))
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp(request.param)
    save_random_model(FAMILIES[request.param](), path)
    return path


@pytest.fixture
def rng() -> random.Random:
    seed = random.randrange(2**32)
    print("seed", seed)
    return random.Random(seed)


def load(folder: Path, dtype: torch.dtype = torch.float32) -> FallbackRunner:
    """A runner whose pages hold NaN, as blocks that somebody else has used may."""
    runner = FallbackRunner.load(
        folder, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, dtype=dtype, device=CPU
    )
    for layer in runner.pages:
        layer.key_cache.fill_(float("nan"))
        layer.value_cache.fill_(float("nan"))
    return runner


def oracle(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32)


def draw_texts(rng: random.Random) -> list[list[int]]:
    return [[rng.randrange(3, VOCAB_SIZE) for _ in range(length)] for length in LENGTHS]


def test_logits_of_ragged_steps(folder: Path, rng: random.Random) -> None:
    texts = draw_texts(rng)
    driver = RaggedDriver(load(folder), len(texts), rng)
    rows: list[list[Tensor]] = [[] for _ in texts]
    while any(driver.is_behind(index, text) for index, text in enumerate(texts)):
        for index, logits in driver.step(texts).items():
            rows[index].append(logits)
    model = oracle(folder)
    for text, found in zip(texts, rows, strict=True):
        with torch.no_grad():
            expected = model(torch.tensor([text])).logits[0]
        torch.testing.assert_close(torch.cat(found), expected, atol=1e-4, rtol=0)


def test_greedy_continuation(folder: Path, rng: random.Random) -> None:
    prompts = draw_texts(rng)
    texts = RaggedDriver(load(folder), len(prompts), rng).continue_greedily(prompts, NUM_NEW_TOKENS)
    model = oracle(folder)
    model.generation_config.eos_token_id = None
    for text, prompt in zip(texts, prompts, strict=True):
        tokens = torch.tensor([prompt])
        expected = model.generate(
            tokens,
            attention_mask=torch.ones_like(tokens),
            max_new_tokens=NUM_NEW_TOKENS,
            do_sample=False,
        )
        assert text == expected[0].tolist()


def test_spec(folder: Path) -> None:
    spec = load(folder).spec
    assert spec.vocab_size == VOCAB_SIZE
    assert spec.context_tokens == CONTEXT_TOKENS
    assert (spec.num_blocks, spec.block_size) == (NUM_BLOCKS, BLOCK_SIZE)
    assert spec.eos_token_ids == {2}


def test_ends_are_those_of_all_files(tmp_path: Path) -> None:
    save_random_model(FAMILIES["gpt2"](), tmp_path)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [5, 6]}')
    assert load(tmp_path).spec.eos_token_ids == {2, 5, 6}


def test_logits_are_float32_and_of_the_wanted_rows_only(folder: Path) -> None:
    runner = load(folder, torch.bfloat16)
    assert runner.pages[0].key_cache.dtype == torch.bfloat16
    text = tuple(range(10, 16))
    chunks = [Chunk(text, 0, (3, 1), 0), Chunk(text, 0, (5, 2), 1), Chunk(text, 0, (4, 9), 3)]
    logits = runner.forward(chunks)
    assert logits.dtype == torch.float32
    assert logits.shape == (4, VOCAB_SIZE)
    assert runner.forward([Chunk(text, 0, (3, 1), 0)]).shape == (0, VOCAB_SIZE)
