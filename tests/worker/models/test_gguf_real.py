"""The real SmolLM2, converted: its tokens are those of llama.cpp, its words make sense."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from chairlift_worker.demo.model import cache_folder, fetch
from chairlift_worker.models.gguf import convert_gguf

pytestmark = pytest.mark.slow

GOLDEN: dict[str, list[int]] = json.loads((Path(__file__).parent / "smollm2_tokens.json").read_text())
"""Written by llama.cpp itself."""


@pytest.fixture(scope="module")
def file() -> Path:
    return fetch(cache_folder(), lambda _part, _what: None)


@pytest.fixture(scope="module")
def folder(file: Path) -> Path:
    return convert_gguf(file, cache_folder())


@pytest.mark.parametrize("text", GOLDEN)
def test_tokens_are_those_of_llama_cpp(text: str, folder: Path) -> None:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert ids == GOLDEN[text]
    assert tokenizer.decode(ids) == text


def test_tokens_are_those_of_llama_cpp_on_much_text(file: Path, folder: Path) -> None:
    llama_cpp = pytest.importorskip("llama_cpp", reason="the oracle is llama-cpp-python, installed by hand")
    oracle = llama_cpp.Llama(str(file), vocab_only=True, verbose=False)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    control = [token.content for token in tokenizer.get_added_tokens_decoder().values()]
    texts = [text for text in [*data_texts(), *random_texts(seed=11)] if not any(c in text for c in control)]
    for text in texts:
        expected = oracle.tokenize(text.encode(), add_bos=False, special=False)
        assert tokenizer.encode(text, add_special_tokens=False).ids == expected, text


def data_texts() -> list[str]:
    if "CHAIRLIFT_DATA" not in os.environ:
        return []
    data = Path(os.environ["CHAIRLIFT_DATA"]) / "multilingual"
    naughty: list[str] = json.loads((data / "blns.json").read_text())
    rights = [json.loads(line) for line in (data / "udhr.jsonl").read_text().splitlines()]
    emoji = (data / "unicode_emoji-test.txt").read_text().splitlines()
    return [*naughty, *emoji, *(value for row in rights for value in row.values() if isinstance(value, str))]


def random_texts(seed: int) -> list[str]:
    rng = random.Random(seed)
    ranges = [(32, 127), (48, 58), (0x80, 0x500), (0x2000, 0x2200), (0x4E00, 0x4F00), (0x1F300, 0x1F700)]
    return [
        "".join(chr(rng.randrange(*rng.choice(ranges))) for _ in range(rng.randrange(1, 30)))
        for _ in range(2000)
    ]


def test_it_answers(folder: Path) -> None:
    torch.set_num_threads(1)
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    question = [{"role": "user", "content": "What is the capital of France? One word."}]
    prompt = tokenizer.apply_chat_template(
        question, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    output = model.generate(**prompt, max_new_tokens=12, do_sample=False)
    assert "Paris" in tokenizer.decode(output[0, prompt["input_ids"].shape[1] :])
