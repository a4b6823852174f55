"""With exact ops, a row's logits are the same to the last bit, whatever else is computed beside it."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    LlamaConfig,
    MistralConfig,
    Phi3Config,
    PreTrainedConfig,
    Qwen3Config,
)

from chairlift_client.errors import ConfigError
from chairlift_worker.engine.batch import Chunk
from chairlift_worker.models.decoder import DecoderRunner
from random_models import save_random_model
from tiny_model import TINY_MODEL

SIZES = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 83,  # no multiple of any vector's length
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
WINDOW = {"sliding_window": 21, "layer_types": ["sliding_attention", "full_attention"], "head_dim": 12}
CONFIGS: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**SIZES),
    "mistral": MistralConfig(**SIZES, sliding_window=21),
    "qwen3": Qwen3Config(**SIZES, head_dim=12),
    "phi3": Phi3Config(**SIZES),
    "gemma2": Gemma2Config(**SIZES, **WINDOW, attn_logit_softcapping=5.0),
    "gemma3": Gemma3TextConfig(**SIZES, **WINDOW),
}
BLOCK_SIZE, NUM_BLOCKS = 4, 256
LENGTHS = (150, 97, 64, 33, 7, 1)


@pytest.fixture(scope="module", params=[*CONFIGS, "tiny"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    if request.param == "tiny":
        return TINY_MODEL
    path = tmp_path_factory.mktemp(request.param)
    save_random_model(CONFIGS[request.param], path)
    return path


@pytest.fixture
def rng() -> random.Random:
    seed = random.randrange(2**32)
    print("seed", seed)
    return random.Random(seed)


def load(folder: Path, dtype: torch.dtype = torch.float32) -> DecoderRunner:
    return DecoderRunner.load(
        folder,
        num_blocks=NUM_BLOCKS,
        block_size=BLOCK_SIZE,
        dtype=dtype,
        device=torch.device("cpu"),
        exact=True,
    )


class Company:
    """Runs texts together: random chunks, random riders, and preemptions, each into other blocks."""

    def __init__(self, runner: DecoderRunner, texts: list[list[int]], rng: random.Random) -> None:
        self._runner, self._texts, self._rng = runner, texts, rng
        self._free = rng.sample(range(NUM_BLOCKS), NUM_BLOCKS)
        self._tables = [self._take(text) for text in texts]
        self._num_computed = [0] * len(texts)
        self.rows: list[dict[int, list[Tensor]]] = [
            {} for _ in texts
        ]  # by position, of every time it was run

    def run(self, num_preemptions: int) -> None:
        """Until every text is through; each row's logits are kept."""
        while behind := [i for i, text in enumerate(self._texts) if self._num_computed[i] < len(text)]:
            if num_preemptions and self._rng.random() < 0.2:
                num_preemptions -= 1
                self._preempt(self._rng.choice(behind))
            self._step(self._rng.sample(behind, self._rng.randint(1, len(behind))))

    def _step(self, riders: list[int]) -> None:
        chunks = []
        for index in riders:
            text, start = self._texts[index], self._num_computed[index]
            end = min(len(text), start + self._rng.choice((1, 1, 2, 3, 9, 17, 40)))
            chunks.append(Chunk(tuple(text[start:end]), start, self._tables[index], end - start))
        logits = torch.split(self._runner.forward(chunks), [chunk.num_logits for chunk in chunks])
        for index, chunk, rows in zip(riders, chunks, logits, strict=True):
            for offset, row in enumerate(rows):
                self.rows[index].setdefault(chunk.start + offset, []).append(row)
            self._num_computed[index] += len(chunk.token_ids)

    def _preempt(self, index: int) -> None:
        self._num_computed[index] = 0
        self._free = [*self._tables[index], *self._free]
        self._rng.shuffle(self._free)
        self._tables[index] = self._take(self._texts[index])

    def _take(self, text: list[int]) -> tuple[int, ...]:
        return tuple(self._free.pop() for _ in range(-(-len(text) // BLOCK_SIZE)))


def test_company_changes_no_bit(folder: Path, rng: random.Random) -> None:
    runner = load(folder)
    texts = [[rng.randrange(3, 97) for _ in range(length)] for length in LENGTHS]
    company = Company(runner, texts, rng)
    company.run(num_preemptions=6)
    for text, rows in zip(texts, company.rows, strict=True):
        alone = runner.forward([Chunk(tuple(text), 0, tuple(range(-(-len(text) // BLOCK_SIZE))), len(text))])
        assert sorted(rows) == list(range(len(text)))
        for position, found in rows.items():
            assert all(torch.equal(row, alone[position]) for row in found), (len(text), position)


def test_exact_logits_are_transformers(folder: Path, rng: random.Random) -> None:
    text = [rng.randrange(3, 97) for _ in range(LENGTHS[0])]
    oracle = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32)
    with torch.no_grad():
        expected = oracle(torch.tensor([text])).logits[0]
    company = Company(load(folder), [text], rng)
    company.run(num_preemptions=0)
    found = torch.stack([company.rows[0][position][0] for position in range(len(text))])
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)


def test_where_it_cannot_be_had() -> None:
    with pytest.raises(ConfigError, match=r"exact needs a CPU and float32, not cpu and torch\.bfloat16"):
        load(TINY_MODEL, torch.bfloat16)
