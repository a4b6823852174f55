"""A converted model is the model that the GGUF file was made from."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    GenerationConfig,
    LlamaConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

from chairlift_client.errors import ModelError
from chairlift_worker.bootstrap import load
from chairlift_worker.config import WorkerConfig
from chairlift_worker.models.gguf import convert_gguf
from gguf_files import CONTROL, NORMAL, GgufWriter, add_model

VOCAB_SIZE = 48
END = 47
_SHAPE = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 7,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_THETA = {"rope_parameters": {"rope_type": "default", "rope_theta": 5000.0}}
_GEMMA3_ROPE = {
    "rope_parameters": {
        "full_attention": {"rope_type": "default", "rope_theta": 5000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
    }
}

FAMILIES: dict[str, Callable[[], PreTrainedConfig]] = {
    "llama": lambda: LlamaConfig(**_SHAPE, **_THETA, head_dim=4, tie_word_embeddings=False),
    "qwen2": lambda: Qwen2Config(**_SHAPE, **_THETA, head_dim=4),
    "qwen3": lambda: Qwen3Config(**_SHAPE, **_THETA, head_dim=8, tie_word_embeddings=True),
    "gemma3": lambda: Gemma3TextConfig(
        **_SHAPE, **_GEMMA3_ROPE, head_dim=8, sliding_window=4, query_pre_attn_scalar=8
    ),
}


def random_model(family: str) -> Any:
    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(FAMILIES[family]())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    return model.eval()


def add_tokens(writer: GgufWriter, **changes: Any) -> None:
    tokens = [f"t{index}" for index in range(VOCAB_SIZE - 1)] + ["<|im_end|>"]
    types = [CONTROL] * 3 + [NORMAL] * (VOCAB_SIZE - 4) + [CONTROL]
    entries: dict[str, Any] = {
        "model": "gpt2",
        "merges": ["t 1"],
        "pre": "gpt-2",
        "bos_token_id": 1,
        "eos_token_id": 2,
        "padding_token_id": 0,
    }
    tokens[3], tokens[4] = "t", "1"
    writer.tokens(tokens, types, **(entries | changes))


def llama_file(path: Path, **changes: Any) -> Path:
    writer = GgufWriter(path, "llama")
    add_model(writer, random_model("llama"))
    add_tokens(writer, **changes)
    return writer.close()


@pytest.mark.parametrize("family", FAMILIES)
def test_converted_model_computes_what_the_original_does(family: str, tmp_path: Path) -> None:
    original = random_model(family)
    writer = GgufWriter(tmp_path / "m.gguf", family)
    add_model(writer, original)
    add_tokens(writer)
    folder = convert_gguf(writer.close(), tmp_path / "cache")
    converted: Any = AutoModelForCausalLM.from_pretrained(folder)
    assert type(converted) is type(original)
    assert converted.dtype == torch.float32
    ids = torch.arange(VOCAB_SIZE)[None]
    with torch.no_grad():
        # 1 + w - 1 rounds, in Gemma's norms alone.
        tolerance = 1e-4 if family == "gemma3" else 0.0
        torch.testing.assert_close(converted(ids).logits, original(ids).logits, rtol=0, atol=tolerance)


def test_a_worker_converts_into_the_cache_that_it_is_told(tmp_path: Path) -> None:
    file, cache = llama_file(tmp_path / "m.gguf"), tmp_path / "cache"
    model = load(WorkerConfig(model=str(file), cache=str(cache), kv_tokens=64, device="cpu"))
    assert model.folder.parent == cache
    assert model.architecture == "LlamaForCausalLM"


def test_ends_are_those_of_the_metadata_and_of_the_turn(tmp_path: Path) -> None:
    folder = convert_gguf(llama_file(tmp_path / "m.gguf"), tmp_path)
    generation = GenerationConfig.from_pretrained(folder)
    assert generation.eos_token_id == [2, END]
    assert (generation.bos_token_id, generation.pad_token_id) == (1, 0)


def test_quantized_weights_are_dequantized(tmp_path: Path) -> None:
    values = np.random.default_rng(3).normal(size=(VOCAB_SIZE, 32)).astype(np.float32)
    folder = convert_gguf(_with_embedding(tmp_path / "q.gguf", values), tmp_path)
    weights: Any = AutoModelForCausalLM.from_pretrained(folder).get_input_embeddings().weight
    kind = gguf.GGMLQuantizationType.Q8_0
    assert np.array_equal(weights.detach().numpy(), gguf.dequantize(gguf.quantize(values, kind), kind))


def _with_embedding(path: Path, values: np.ndarray[Any, Any]) -> Path:
    config = LlamaConfig(**(_SHAPE | {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 1}))
    model: Any = AutoModelForCausalLM.from_config(config)
    del model.model.embed_tokens
    writer = GgufWriter(path, "llama")
    add_model(writer, model)
    writer.tensor("token_embd.weight", values, gguf.GGMLQuantizationType.Q8_0)
    add_tokens(writer)
    return writer.close()


def test_llama3_scaling_is_recovered_from_its_divisors(tmp_path: Path) -> None:
    rope = {
        "rope_type": "llama3",
        "rope_theta": 500_000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    config = LlamaConfig(**_SHAPE, head_dim=64, rope_parameters=rope)
    model: Any = AutoModelForCausalLM.from_config(config)
    plain = 1 / 500_000.0 ** (torch.arange(0, 64, 2) / 64)
    divisors = plain / model.model.rotary_emb.inv_freq
    writer = GgufWriter(tmp_path / "m.gguf", "llama")
    add_model(writer, model)
    writer.tensor("rope_freqs.weight", divisors.numpy())
    add_tokens(writer)
    folder = convert_gguf(writer.close(), tmp_path)
    converted: Any = AutoModelForCausalLM.from_pretrained(folder)
    torch.testing.assert_close(converted.model.rotary_emb.inv_freq, model.model.rotary_emb.inv_freq)


def test_second_conversion_finds_the_first(tmp_path: Path) -> None:
    file = llama_file(tmp_path / "m.gguf")
    first = convert_gguf(file, tmp_path / "cache")
    written = (first / "model.safetensors").stat()
    seen: list[tuple[float, str]] = []
    assert convert_gguf(file, tmp_path / "cache", lambda part, what: seen.append((part, what))) == first
    assert (first / "model.safetensors").stat() == written
    assert seen[-1] == (1.0, "already converted")


def test_another_content_under_the_same_name_is_another_model(tmp_path: Path) -> None:
    first = convert_gguf(llama_file(tmp_path / "m.gguf"), tmp_path / "cache")
    assert convert_gguf(llama_file(tmp_path / "m.gguf", eos_token_id=5), tmp_path / "cache") != first


def test_progress_goes_from_nothing_to_all(tmp_path: Path) -> None:
    parts: list[float] = []
    convert_gguf(llama_file(tmp_path / "m.gguf"), tmp_path, lambda part, _what: parts.append(part))
    assert parts == sorted(parts)
    assert (parts[0], parts[-1]) == (0.0, 1.0)
    assert len(parts) > 10


def test_conversions_at_the_same_time_end_in_one_folder(tmp_path: Path) -> None:
    file, cache = llama_file(tmp_path / "m.gguf"), tmp_path / "cache"
    folders: list[Path] = []
    threads = [threading.Thread(target=lambda: folders.append(convert_gguf(file, cache))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(folders) == 4
    assert list(cache.iterdir()) == [folders[0]]


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"model": "bert"}, "tokenizer 'bert'"),
        ({"pre": "tekken"}, "pre-tokenizer 'tekken'"),
        ({"eos_token_id": "two"}, "eos_token_id' should be an integer, is str"),
    ],
)
def test_a_tokenizer_that_is_not_known_is_named(changes: dict[str, Any], named: str, tmp_path: Path) -> None:
    file = llama_file(tmp_path / "m.gguf", **changes)
    with pytest.raises(ModelError, match=named):
        convert_gguf(file, tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


def test_an_architecture_that_is_not_known_is_named(tmp_path: Path) -> None:
    file = GgufWriter(tmp_path / "m.gguf", "mamba").close()
    with pytest.raises(ModelError, match="architecture 'mamba' is not supported"):
        convert_gguf(file, tmp_path / "cache")


def test_a_file_with_a_vocabulary_alone_is_refused(tmp_path: Path) -> None:
    writer = GgufWriter(tmp_path / "m.gguf", "llama")
    add_tokens(writer)
    with pytest.raises(ModelError, match="no model weights"):
        convert_gguf(writer.close(), tmp_path / "cache")


def test_a_tensor_without_a_place_is_named(tmp_path: Path) -> None:
    writer = GgufWriter(tmp_path / "m.gguf", "llama")
    add_model(writer, random_model("llama"))
    add_tokens(writer)
    writer.tensor("blk.0.attn_q.bias", np.zeros(24, np.float32))
    with pytest.raises(ModelError, match=r"'blk\.0\.attn_q\.bias' is not known"):
        convert_gguf(writer.close(), tmp_path / "cache")


def test_a_file_cut_off_anywhere_is_refused(tmp_path: Path) -> None:
    whole = llama_file(tmp_path / "m.gguf").read_bytes()
    cut = tmp_path / "cut.gguf"
    for length in [0, 3, 4, 11, 30, *range(40, len(whole) - 32, len(whole) // 60)]:
        cut.write_bytes(whole[:length])
        with pytest.raises(ModelError, match=r"cut\.gguf"):
            convert_gguf(cut, tmp_path / "cache")


@pytest.mark.parametrize(
    ("content", "reason"), [(b"PK\x03\x04" * 20, "not a GGUF"), (b"GGUF\0\0\0\x03", "version")]
)
def test_what_is_no_gguf_file_is_refused(content: bytes, reason: str, tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(content)
    with pytest.raises(ModelError, match=reason):
        convert_gguf(tmp_path / "m.gguf", tmp_path / "cache")


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"none\.gguf"):
        convert_gguf(tmp_path / "none.gguf", tmp_path)
