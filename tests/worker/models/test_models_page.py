"""Every row of docs/models.md holds: what runs equals transformers, what does not is refused by its name."""

from __future__ import annotations

import random
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from chairlift_client.errors import ModelError
from chairlift_worker.models.decoder import DecoderRunner
from chairlift_worker.models.decoder_shape import FAMILIES
from chairlift_worker.models.fallback import FallbackRunner
from chairlift_worker.models.loading import load_model
from model_table import ROWS, Row
from ragged_driver import RaggedDriver
from random_models import save_random_model
from ties import count_ties
from tiny_model import TINY_MODEL

PAGE = Path(__file__).parents[3] / "docs" / "models.md"
CLASSES = {"decoder": DecoderRunner, "transformers": FallbackRunner}
LENGTHS = (17, 9, 1)
NUM_NEW_TOKENS = 6
RUNS = {row.architecture: row for row in ROWS if row.runs_on != "refused"}
REFUSED = {row.architecture: row for row in ROWS if row.runs_on == "refused"}


def save(row: Row, folder: Path) -> None:
    config = row.config()
    save_random_model(config, folder)
    shutil.copy(TINY_MODEL / "tokenizer.json", folder)  # for text nobody reads
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')


def test_the_page_has_these_rows() -> None:
    lines = [line for line in PAGE.read_text().splitlines() if line.startswith("| `")]
    assert lines == [row.line() for row in ROWS]


def test_the_decoder_has_no_other_families() -> None:
    assert {row.architecture for row in ROWS if row.runs_on == "decoder"} == set(FAMILIES)


@pytest.mark.parametrize("architecture", RUNS)
def test_what_runs_equals_transformers(architecture: str, tmp_path: Path) -> None:
    row = RUNS[architecture]
    seed = random.randrange(2**32)
    print("seed", seed)
    rng = random.Random(seed)
    save(row, tmp_path)
    oracle = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager", dtype=torch.float32)
    oracle.generation_config.eos_token_id = None
    model = load_model(str(tmp_path), kv_tokens=96, block_size=4)
    assert model.architecture == row.architecture
    assert isinstance(model.runner, CLASSES[row.runs_on])
    prompts = [[rng.randrange(3, 97) for _ in range(length)] for length in LENGTHS]
    check_logits(RaggedDriver(model.runner, len(prompts), rng), oracle, prompts)
    texts = RaggedDriver(model.runner, len(prompts), rng).continue_greedily(prompts, NUM_NEW_TOKENS)
    print("ties", sum(map(check_greedy, [oracle] * len(prompts), prompts, texts)))


def check_logits(driver: RaggedDriver, oracle: Any, texts: list[list[int]]) -> None:
    rows: list[list[torch.Tensor]] = [[] for _ in texts]
    while any(driver.is_behind(index, text) for index, text in enumerate(texts)):
        for index, logits in driver.step(texts).items():
            rows[index].append(logits)
    for text, found in zip(texts, rows, strict=True):
        with torch.no_grad():
            expected = oracle(torch.tensor([text])).logits[0]
        torch.testing.assert_close(torch.cat(found), expected, atol=1e-4, rtol=0)


def check_greedy(oracle: Any, prompt: list[int], text: list[int]) -> int:
    """The number of ties."""
    tokens = torch.tensor([prompt])
    expected = oracle.generate(
        tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=NUM_NEW_TOKENS, do_sample=False
    )
    return count_ties(oracle, prompt, text[len(prompt) :], expected[0, len(prompt) :].tolist())


@pytest.mark.parametrize("architecture", REFUSED)
def test_what_does_not_run_is_refused_by_name(architecture: str, tmp_path: Path) -> None:
    row = REFUSED[architecture]
    config = row.config()
    if config.num_hidden_layers == 2:
        save(row, tmp_path)
    else:  # as large as in life; refused before any weight is read
        config.architectures = [row.architecture]
        config.save_pretrained(tmp_path)
    with pytest.raises(
        ModelError, match=f"^{row.architecture} cannot run .*{re.escape(row.error or row.reason)}"
    ):
        load_model(str(tmp_path), kv_tokens=64)
