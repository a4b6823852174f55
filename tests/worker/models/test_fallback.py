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
from random_models import CONTEXT_TOKENS, FAMILIES, VOCAB_SIZE, save_random_model

CPU = torch.device("cpu")
BLOCK_SIZE, BLOCKS_EACH = 4, 9
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


class Driver:
    """Feeds sequences to a runner in chunks of random length, a random few of them in each step."""

    def __init__(self, runner: FallbackRunner, rng: random.Random) -> None:
        self.runner = runner
        self.rng = rng
        blocks = list(range(runner.spec.num_blocks))
        rng.shuffle(blocks)
        self.tables = [tuple(blocks[i :: len(LENGTHS)][:BLOCKS_EACH]) for i in range(len(LENGTHS))]
        self.num_computed = [0] * len(LENGTHS)

    def step(self, texts: list[list[int]]) -> dict[int, Tensor]:
        """Advance some sequences; returns the logits of each one's new rows by its index."""
        behind = [i for i, text in enumerate(texts) if self.num_computed[i] < len(text)]
        riding = self.rng.sample(behind, self.rng.randint(1, len(behind)))
        chunks = [self._chunk(i, texts[i]) for i in riding]
        logits = torch.split(self.runner.forward(chunks), [chunk.num_logits for chunk in chunks])
        return dict(zip(riding, logits, strict=True))

    def _chunk(self, index: int, text: list[int]) -> Chunk:
        start = self.num_computed[index]
        end = min(len(text), start + self.rng.randint(1, 8))
        self.num_computed[index] = end
        return Chunk(tuple(text[start:end]), start, self.tables[index], num_logits=end - start)


def load(folder: Path, dtype: torch.dtype = torch.float32) -> FallbackRunner:
    """A runner whose pages hold NaN, as blocks that somebody else has used may."""
    num_blocks = BLOCKS_EACH * len(LENGTHS)
    runner = FallbackRunner.load(
        folder, num_blocks=num_blocks, block_size=BLOCK_SIZE, dtype=dtype, device=CPU
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
    driver = Driver(load(folder), rng)
    rows: dict[int, list[Tensor]] = {index: [] for index in range(len(texts))}
    while any(driver.num_computed[i] < len(text) for i, text in enumerate(texts)):
        for index, logits in driver.step(texts).items():
            rows[index].append(logits)
    model = oracle(folder)
    for index, text in enumerate(texts):
        with torch.no_grad():
            expected = model(torch.tensor([text])).logits[0]
        torch.testing.assert_close(torch.cat(rows[index]), expected, atol=1e-4, rtol=0)


def test_greedy_continuation(folder: Path, rng: random.Random) -> None:
    prompts = draw_texts(rng)
    texts = [list(prompt) for prompt in prompts]
    driver = Driver(load(folder), rng)
    while any(len(t) < len(p) + NUM_NEW_TOKENS for t, p in zip(texts, prompts, strict=True)):
        unfinished = [
            t if len(t) < len(p) + NUM_NEW_TOKENS else [] for t, p in zip(texts, prompts, strict=True)
        ]
        for index, logits in driver.step(unfinished).items():
            if driver.num_computed[index] == len(texts[index]):
                texts[index].append(int(logits[-1].argmax()))
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
    assert (spec.num_blocks, spec.block_size) == (BLOCKS_EACH * len(LENGTHS), BLOCK_SIZE)
    assert spec.eos_token_ids == {2}


def test_logits_are_float32_and_of_the_wanted_rows_only(folder: Path) -> None:
    runner = load(folder, torch.bfloat16)
    assert runner.pages[0].key_cache.dtype == torch.bfloat16
    text = tuple(range(10, 16))
    chunks = [Chunk(text, 0, (3, 1), 0), Chunk(text, 0, (5, 2), 1), Chunk(text, 0, (4, 9), 3)]
    logits = runner.forward(chunks)
    assert logits.dtype == torch.float32
    assert logits.shape == (4, VOCAB_SIZE)
    assert runner.forward([Chunk(text, 0, (3, 1), 0)]).shape == (0, VOCAB_SIZE)
