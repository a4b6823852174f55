"""A converted tokenizer cuts text as the one that the GGUF file was made from."""

from __future__ import annotations

import json
import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer

from chairlift_worker.models.gguf_file import GgufFile
from chairlift_worker.models.gguf_tokenizer import tokenizer_config_of, tokenizer_of
from gguf_files import BYTE, CONTROL, NORMAL, UNKNOWN, USER_DEFINED, GgufWriter

TEXTS = [
    "",
    "Hello world, it's 2024 and we've 1234567 things.",
    "  two  spaces   and\ttabs\n\n\nlines\r\n",
    "def f(x):\n    return x[1:10]  # 0x1F\n",
    "İstanbul'da ğüşıöç ½ ² Ⅷ ١٢٣",
    "日本語のテキスト 2024年",
    "🎉🏳️‍🌈👨‍👩‍👧 é",
]


def trained_byte_level(pre_tokenizer: pre_tokenizers.PreTokenizer) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizer
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXTS * 3, trainer)
    return tokenizer


def written(path: Path, tokenizer: Tokenizer, pre: str) -> GgufFile:
    merges = [" ".join(pair) for pair in json.loads(tokenizer.to_str())["model"]["merges"]]
    vocabulary = tokenizer.get_vocab()
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    types = [CONTROL] * 3 + [NORMAL] * (len(tokens) - 3)
    writer = GgufWriter(path, "llama")
    writer.add(context_length=64)
    writer.tokens(tokens, types, "gpt2", pre=pre, merges=merges, bos_token_id=1, eos_token_id=2)
    writer.entry("tokenizer.chat_template", "{{ messages[0]['content'] }}<|im_end|>")
    return GgufFile(writer.close())


@pytest.mark.parametrize("pre", ["gpt-2", "smollm"])
def test_byte_level_tokenizer_cuts_alike(pre: str, tmp_path: Path) -> None:
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    digits = pre_tokenizers.Digits(individual_digits=True)
    steps = [byte_level] if pre == "gpt-2" else [digits, byte_level]
    original = trained_byte_level(pre_tokenizers.Sequence(steps))
    converted = tokenizer_of(written(tmp_path / "t.gguf", original, pre))
    for text in [*TEXTS, "<|im_start|>user\nhi<|im_end|>"]:
        ids = converted.encode(text).ids
        assert ids == original.encode(text).ids
        assert converted.decode(ids, skip_special_tokens=False) == text


@pytest.mark.parametrize(
    ("pre", "text", "pieces"),
    [
        ("smollm", "in 2024", ["in", "Ġ", "2", "0", "2", "4"]),
        ("qwen2", "in 2024\n\n", ["in", "Ġ", "2", "0", "2", "4", "ĊĊ"]),
        ("llama-bpe", "in 20245 I'LL", ["in", "Ġ", "202", "45", "ĠI", "'LL"]),
        ("gpt-2", "in 20245 I'll", ["in", "Ġ20245", "ĠI", "'ll"]),
    ],
)
def test_pre_tokenizer_splits_where_its_family_does(
    pre: str, text: str, pieces: list[str], tmp_path: Path
) -> None:
    original = trained_byte_level(pre_tokenizers.ByteLevel(add_prefix_space=False))
    converted = tokenizer_of(written(tmp_path / "t.gguf", original, pre))
    assert converted.pre_tokenizer is not None
    assert [piece for piece, _ in converted.pre_tokenizer.pre_tokenize_str(text)] == pieces


def test_transformers_loads_it_with_its_chat_template(tmp_path: Path) -> None:
    original = trained_byte_level(pre_tokenizers.ByteLevel(add_prefix_space=False))
    file = written(tmp_path / "t.gguf", original, "gpt-2")
    tokenizer_of(file).save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(tokenizer_config_of(file)))
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    text = loaded.apply_chat_template([{"role": "user", "content": "Hello 12"}], tokenize=False)
    assert text == "Hello 12<|im_end|>"
    assert loaded(text)["input_ids"] == original.encode(text).ids
    assert (loaded.bos_token, loaded.eos_token) == ("<|im_start|>", "<|im_end|>")


# --- SentencePiece ---------------------------------------------------------------------------------

_BYTES = [f"<0x{value:02X}>" for value in range(256)]
_LETTERS = list("abc▁é")


def sentencepiece_vocabulary(rng: random.Random) -> tuple[list[str], list[int], list[float]]:
    """Control tokens, bytes, letters, and longer pieces, each made of two that are there already."""
    pieces = list(_LETTERS)
    while len(pieces) < 60:
        made = rng.choice(pieces) + rng.choice(pieces)
        if len(made) <= 6 and made not in pieces:
            pieces.append(made)
    tokens = ["<unk>", "<s>", "</s>", "\n\n", *_BYTES, *pieces]
    types = [UNKNOWN, CONTROL, CONTROL, USER_DEFINED, *[BYTE] * 256, *[NORMAL] * len(pieces)]
    scores = [0.0] * (4 + 256) + [-float(rank) for rank in range(len(pieces))]
    return tokens, types, scores


def greedy_pieces(text: str, scores: dict[str, float]) -> list[str]:
    """SentencePiece BPE by its definition: merge the neighbours with the best score, leftmost first."""
    parts = list(text)
    while True:
        pairs = [(scores.get(a + b), -index) for index, (a, b) in enumerate(pairwise(parts))]
        known = [(score, position) for score, position in pairs if score is not None]
        if not known:
            return parts
        index = -max(known)[1]
        parts[index : index + 2] = [parts[index] + parts[index + 1]]


def sentencepiece_file(path: Path, seed: int, **entries: Any) -> GgufFile:
    tokens, types, scores = sentencepiece_vocabulary(random.Random(seed))
    writer = GgufWriter(path, "gemma3")
    writer.tokens(
        tokens, types, "llama", scores=scores, bos_token_id=1, eos_token_id=2, unknown_token_id=0, **entries
    )
    return GgufFile(writer.close())


@pytest.mark.parametrize("seed", range(8))
def test_sentencepiece_merges_by_score(seed: int, tmp_path: Path) -> None:
    tokens, _, all_scores = sentencepiece_vocabulary(random.Random(seed))
    scores = dict(zip(tokens[260:], all_scores[260:], strict=True))
    file = sentencepiece_file(tmp_path / "t.gguf", seed, add_space_prefix=False, add_bos_token=False)
    converted, rng = tokenizer_of(file), random.Random(seed)
    for _ in range(50):
        text = "".join(rng.choice("aabbcc é") for _ in range(rng.randrange(20)))
        encoded = converted.encode(text)
        assert encoded.tokens == greedy_pieces(text.replace(" ", "▁"), scores), f"seed {seed}: {text!r}"
        assert converted.decode(encoded.ids) == text


def test_sentencepiece_adds_space_and_begin_and_falls_back_to_bytes(tmp_path: Path) -> None:
    converted = tokenizer_of(sentencepiece_file(tmp_path / "t.gguf", 0))
    encoded = converted.encode("a\n\nž")
    assert encoded.tokens[0] == "<s>"
    assert encoded.tokens[1].startswith("▁")
    assert "\n\n" in encoded.tokens
    assert encoded.tokens[-2:] == ["<0xC5>", "<0xBE>"]
    assert converted.decode(converted.encode("a bž").ids) == "a bž"
