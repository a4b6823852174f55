"""The lean decoder against transformers' own models: small, random, in float32."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    LlamaConfig,
    MistralConfig,
    OPTConfig,
    Phi3Config,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
    SmolLM3Config,
)

from chairlift_client.errors import ModelError
from chairlift_worker.engine.batch import Chunk
from chairlift_worker.models.decoder import DecoderRunner

SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,  # large, so that logits differ by much more than the tolerance
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 100.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 100.0,
    "short_factor": [1.0] * 4,
    "long_factor": [2.0] * 4,
    "original_max_position_embeddings": 64,
}
GEMMA3_ROPES = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
    "full_attention": {"rope_type": "linear", "rope_theta": 5000.0, "factor": 4.0},
}
PARTIAL_ROPE = {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.5}
CONFIGS: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**SIZES),
    "llama_tied_biased": LlamaConfig(
        **SIZES, tie_word_embeddings=True, attention_bias=True, mlp_bias=True, head_dim=12
    ),
    "llama3_rope": LlamaConfig(**SIZES, rope_parameters=LLAMA3),
    "llama_linear_rope": LlamaConfig(
        **SIZES, rope_parameters={"rope_type": "linear", "rope_theta": 100.0, "factor": 4.0}
    ),
    "llama_dynamic_rope": LlamaConfig(
        **{**SIZES, "max_position_embeddings": 42},
        rope_parameters={"rope_type": "dynamic", "rope_theta": 100.0, "factor": 4.0},
    ),
    "llama_yarn": LlamaConfig(**SIZES, rope_parameters=YARN),
    "mistral_window": MistralConfig(**SIZES, sliding_window=8),
    "mistral_full": MistralConfig(**SIZES, sliding_window=None, head_dim=16),
    "qwen2": Qwen2Config(**SIZES),
    "qwen2_window": Qwen2Config(**SIZES, use_sliding_window=True, sliding_window=8, max_window_layers=1),
    "qwen3": Qwen3Config(**SIZES, head_dim=20),
    "smollm3": SmolLM3Config(**SIZES, no_rope_layers=[1, 0, 1]),
    "phi3": Phi3Config(**SIZES),
    "phi3_partial_window": Phi3Config(**SIZES, sliding_window=8, rope_parameters=PARTIAL_ROPE),
    "gemma2": Gemma2Config(
        **SIZES,
        head_dim=12,
        query_pre_attn_scalar=20,
        sliding_window=8,
        attn_logit_softcapping=5.0,
        final_logit_softcapping=4.0,
    ),
    "gemma2_uncapped": Gemma2Config(
        **SIZES, head_dim=8, attention_bias=True, attn_logit_softcapping=None, final_logit_softcapping=None
    ),
    "gemma3": Gemma3TextConfig(
        **SIZES,
        head_dim=12,
        query_pre_attn_scalar=20,
        sliding_window=8,
        sliding_window_pattern=2,
        rope_parameters=GEMMA3_ROPES,
    ),
    "gemma3_untied": Gemma3TextConfig(
        **SIZES, head_dim=12, sliding_window=8, tie_word_embeddings=False, final_logit_softcapping=4.0
    ),
}
BLOCK_SIZE = 4


class Model(NamedTuple):
    """The same weights twice: ours, and the oracle."""

    runner: DecoderRunner
    oracle: Any


def save_random_model(config: PreTrainedConfig, folder: Path, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias") or "norm" in name:  # initialised to constants, which hide mistakes
                parameter.add_(torch.randn_like(parameter) * 0.3)
    model.save_pretrained(folder)
    return model


def load(folder: Path, num_blocks: int = 64) -> DecoderRunner:
    return DecoderRunner.load(
        folder,
        num_blocks=num_blocks,
        block_size=BLOCK_SIZE,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )


@pytest.fixture(params=CONFIGS)
def model(request: pytest.FixtureRequest, tmp_path: Path) -> Model:
    oracle = save_random_model(CONFIGS[request.param], tmp_path)
    return Model(load(tmp_path), oracle)


def oracle_logits(oracle: Any, token_ids: list[int]) -> Tensor:
    with torch.no_grad():
        logits: Tensor = oracle(torch.tensor([token_ids])).logits[0]
    return logits


class Pool:
    """Hands out shuffled blocks, so that no sequence lies in one piece."""

    def __init__(self, num_blocks: int, draw: random.Random) -> None:
        self._free = draw.sample(range(num_blocks), num_blocks)

    def table(self, num_tokens: int) -> tuple[int, ...]:
        return tuple(self._free.pop() for _ in range(-(-num_tokens // BLOCK_SIZE)))


def test_mixed_batches_equal_transformers(model: Model) -> None:
    """Prefill chunks, decodes and multi-token steps of several sequences in one forward."""
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    draw = random.Random(seed)
    texts = [[draw.randrange(97) for _ in range(length)] for length in (41, 3, 29, 17)]
    expected = [oracle_logits(model.oracle, text) for text in texts]
    pool = Pool(model.runner.spec.num_blocks, draw)
    tables = [pool.table(len(text)) for text in texts]
    done = [0] * len(texts)
    while any(done[index] < len(text) for index, text in enumerate(texts)):
        riders = [index for index, text in enumerate(texts) if done[index] < len(text)]
        draw.shuffle(riders)
        chunks, wanted = [], []
        for index in riders[: draw.randint(1, len(riders))]:
            start, end = done[index], min(done[index] + draw.choice([1, 1, 2, 5, 13]), len(texts[index]))
            num_logits = draw.randint(0, end - start)
            chunks.append(Chunk(tuple(texts[index][start:end]), start, tables[index], num_logits))
            wanted.append(expected[index][end - num_logits : end])
            done[index] = end
        logits = model.runner.forward(chunks)
        assert logits.dtype == torch.float32
        torch.testing.assert_close(logits, torch.cat(wanted), atol=1e-4, rtol=1e-4)


def test_greedy_equals_generate(model: Model) -> None:
    """Four sequences of different lengths, prefilled and then decoded together."""
    draw = random.Random(5)
    prompts = [[draw.randrange(3, 97) for _ in range(length)] for length in (1, 9, 20, 30)]
    pool = Pool(model.runner.spec.num_blocks, draw)
    texts = [list(prompt) for prompt in prompts]
    tables = [pool.table(len(prompt) + 12) for prompt in prompts]
    starts = [0] * len(prompts)
    for _ in range(12):
        chunks = [
            Chunk(tuple(text[start:]), start, table, 1)
            for text, start, table in zip(texts, starts, tables, strict=True)
        ]
        starts = [len(text) for text in texts]
        for text, token in zip(texts, model.runner.forward(chunks).argmax(-1).tolist(), strict=True):
            text.append(token)
    for prompt, text in zip(prompts, texts, strict=True):
        generated = model.oracle.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            do_sample=False,
            min_new_tokens=12,
            max_new_tokens=12,
            eos_token_id=None,
        )
        assert text == generated[0].tolist()


def test_spec(tmp_path: Path) -> None:
    save_random_model(CONFIGS["llama"], tmp_path)
    spec = load(tmp_path, num_blocks=9).spec
    assert spec == (97, 256, 9, BLOCK_SIZE, frozenset({2}))


def test_free_blocks_of_nan_do_not_leak(tmp_path: Path) -> None:
    oracle = save_random_model(CONFIGS["mistral_window"], tmp_path)
    runner = load(tmp_path)
    runner._keys.fill_(float("nan"))
    runner._values.fill_(float("nan"))
    text = [5, 6, 7, 8, 9, 10]
    logits = runner.forward([Chunk(tuple(text[:5]), 0, (7, 3), 0), Chunk((4,), 0, (9,), 1)])
    assert not logits.isnan().any()
    logits = runner.forward([Chunk((text[5],), 5, (7, 3), 1)])
    torch.testing.assert_close(logits[0], oracle_logits(oracle, text)[-1], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["llama", "gemma2", "gemma3"])
def test_half_precision_errs_no_more_than_transformers(name: str, tmp_path: Path) -> None:
    oracle = save_random_model(CONFIGS[name], tmp_path)
    runner = DecoderRunner.load(
        tmp_path, num_blocks=8, block_size=8, dtype=torch.bfloat16, device=torch.device("cpu")
    )
    text = [5, 6, 7, 8, 9, 10, 11, 12, 13]
    exact = oracle_logits(oracle, text)
    theirs = oracle_logits(oracle.to(torch.bfloat16), text).float()
    ours = runner.forward([Chunk(tuple(text), 0, (1, 2), 9)])
    assert ours.dtype == torch.float32
    assert (ours - exact).norm() < 1.2 * (theirs - exact).norm()


def test_sharded_weights(tmp_path: Path) -> None:
    oracle = save_random_model(CONFIGS["llama"], tmp_path / "whole")
    oracle.save_pretrained(tmp_path / "shards", max_shard_size="60KB")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 1
    chunk = Chunk((3, 4, 5), 0, (0,), 3)
    whole, shards = load(tmp_path / "whole"), load(tmp_path / "shards")
    assert torch.equal(whole.forward([chunk]), shards.forward([chunk]))
    sorted((tmp_path / "shards").glob("*.safetensors"))[-1].unlink()
    with pytest.raises(ModelError, match="missing"):
        load(tmp_path / "shards")


def test_other_architectures_are_refused_by_name(tmp_path: Path) -> None:
    OPTConfig(architectures=["OPTForCausalLM"]).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="OPTForCausalLM"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (LlamaConfig(**SIZES, hidden_act="gelu"), "gelu"),
        (LlamaConfig(**SIZES, rope_parameters=LONGROPE), "longrope"),
        (Gemma3TextConfig(**SIZES, rope_parameters={"full_attention": LONGROPE}), "longrope"),
        (Gemma3TextConfig(**SIZES, use_bidirectional_attention=True), "both directions"),
        (Qwen3Config(**SIZES, layer_types=["chunked_attention"] * 3), "chunked_attention"),
    ],
)
def test_variants_it_does_not_know_are_refused(
    tmp_path: Path, config: PreTrainedConfig, message: str
) -> None:
    config.architectures = [type(config).__name__.removesuffix("Config").removesuffix("Text") + "ForCausalLM"]
    config.save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=message):
        load(tmp_path)


def test_weights_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    save_random_model(CONFIGS["llama"], tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    name = "model.layers.1.self_attn.k_proj.weight"

    save_file({key: tensor for key, tensor in tensors.items() if key != name}, path)
    with pytest.raises(ModelError, match=f"no tensor '{name}'"):
        load(tmp_path)

    save_file({**tensors, name: torch.zeros(16, 47)}, path)
    with pytest.raises(ModelError, match=r"\(16, 47\).*\(16, 48\)"):
        load(tmp_path)

    save_file({**tensors, "model.layers.1.self_attn.extra.weight": torch.zeros(2)}, path)
    with pytest.raises(ModelError, match=r"no place for 1 .*extra"):
        load(tmp_path)

    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(ModelError, match="not a whole safetensors file"):
        load(tmp_path)


def test_pickled_weights_are_refused(tmp_path: Path) -> None:
    config = LlamaConfig(**SIZES, architectures=["LlamaForCausalLM"])
    config.save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"no \.safetensors files"):
        load(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(ModelError, match=r"pytorch_model\.bin.*can run code"):
        load(tmp_path)
