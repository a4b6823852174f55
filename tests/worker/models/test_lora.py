"""The decoder with LoRA adapters against transformers with the adapters' weights merged into its own."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Gemma3TextConfig, LlamaConfig, Phi3Config, PreTrainedConfig, Qwen2Config

from chairlift_client.errors import ModelError
from chairlift_worker.engine.batch import Chunk
from chairlift_worker.models.decoder import DecoderRunner
from chairlift_worker.models.lora_weights import LoraWeights
from lora_adapters import ALL, FUSED, edit_config, edit_tensors, merged, save_random_adapter
from random_models import save_random_model
from tiny_model import TINY_MODEL

SIZES = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 83,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
CONFIGS: dict[str, Callable[[], PreTrainedConfig]] = {
    "llama": lambda: LlamaConfig(**SIZES, attention_bias=True),
    "qwen2": lambda: Qwen2Config(**SIZES),
    "phi3": lambda: Phi3Config(**SIZES),
    "gemma3": lambda: Gemma3TextConfig(**SIZES, head_dim=12, sliding_window=9),
}
BLOCK_SIZE, NUM_BLOCKS, NUM_TOKENS = 4, 256, 24
Scale = Callable[[str], float]


class Kind:
    """A way to make an adapter, and the scale that follows from it."""

    def __init__(self, scale: Scale, **options: Any) -> None:
        self.scale, self.options = scale, options


KINDS = {
    "plain": Kind(lambda _: 2.0),
    "attention": Kind(lambda _: 0.5, targets=("q_proj", "v_proj"), rank=16),
    "rank 1": Kind(lambda _: 3.0, rank=1, alpha=3, targets=("k_proj", "up_proj", "down_proj")),
    "rslora": Kind(lambda _: 8 / 4**0.5, use_rslora=True),
    "patterns": Kind(
        lambda module: (
            5 / 7 if module == "model.layers.1.mlp.down_proj" else 8 / 7 if "mlp.down" in module else 2.0
        ),
        rank_of=lambda module: 7 if module.endswith("down_proj") else 4,
        rank_pattern={"down_proj": 7},
        alpha_pattern={r"^model\.layers\.1\.mlp\.down_proj": 5},
    ),
    "regular expression": Kind(lambda _: 2.0, target_modules=r".*\.(q|k|v|o|up|gate|down)_proj"),
}


@pytest.fixture
def rng() -> random.Random:
    seed = random.randrange(2**32)
    print("seed", seed)
    return random.Random(seed)


@pytest.fixture(scope="module", params=[*CONFIGS, "tiny"])
def base(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    if request.param == "tiny":
        return TINY_MODEL
    path = tmp_path_factory.mktemp(request.param)
    save_random_model(CONFIGS[request.param](), path)
    return path


def load(base: Path, *, exact: bool = False) -> DecoderRunner:
    return DecoderRunner.load(
        base,
        num_blocks=NUM_BLOCKS,
        block_size=BLOCK_SIZE,
        dtype=torch.float32,
        device=torch.device("cpu"),
        exact=exact,
    )


def targets_of(base: Path) -> tuple[str, ...]:
    return FUSED if base.name.startswith("phi3") else ALL


class Mix:
    """Texts with adapters of their own, computed in random company, pieces and order."""

    def __init__(
        self,
        runner: DecoderRunner,
        texts: list[list[int]],
        adapters: list[LoraWeights | None],
        rng: random.Random,
    ) -> None:
        self._runner, self._texts, self._adapters, self._rng = runner, texts, adapters, rng
        blocks = rng.sample(range(NUM_BLOCKS), NUM_BLOCKS)
        self._tables = [tuple(blocks[index :: len(texts)]) for index in range(len(texts))]

    def logits(self) -> list[Tensor]:
        """Of every position of every text."""
        computed = [0] * len(self._texts)
        rows: list[list[Tensor]] = [[] for _ in self._texts]
        while behind := [i for i, text in enumerate(self._texts) if computed[i] < len(text)]:
            chunks, riders = [], self._rng.sample(behind, self._rng.randint(1, len(behind)))
            for index in riders:
                start = computed[index]
                end = computed[index] = min(len(self._texts[index]), start + self._rng.choice((1, 1, 2, 9)))
                chunks.append(
                    Chunk(
                        tuple(self._texts[index][start:end]),
                        start,
                        self._tables[index],
                        end - start,
                        adapter=self._adapters[index],
                    )
                )
            told = torch.split(self._runner.forward(chunks), [chunk.num_logits for chunk in chunks])
            for index, logits in zip(riders, told, strict=True):
                rows[index].append(logits)
        return [torch.cat(parts) for parts in rows]


def alone(runner: DecoderRunner, text: list[int], adapter: LoraWeights | None) -> Tensor:
    table = tuple(range(-(-len(text) // BLOCK_SIZE)))
    return runner.forward([Chunk(tuple(text), 0, table, len(text), adapter=adapter)])


def greedily(runner: DecoderRunner, prompt: list[int], adapter: LoraWeights, num_new: int) -> list[int]:
    text, start, table = list(prompt), 0, tuple(range(NUM_BLOCKS))
    for _ in range(num_new):
        logits = runner.forward([Chunk(tuple(text[start:]), start, table, 1, adapter=adapter)])
        start = len(text)
        text.append(int(logits[-1].argmax()))
    return text[len(prompt) :]


def make_text(rng: random.Random, length: int = NUM_TOKENS) -> list[int]:
    return [rng.randrange(3, 97) for _ in range(length)]


@pytest.mark.parametrize("name", KINDS)
def test_an_adapter_is_the_merged_model(base: Path, name: str, tmp_path: Path, rng: random.Random) -> None:
    kind = KINDS[name]
    options = {"targets": targets_of(base), **kind.options}
    if targets_of(base) is FUSED and "q_proj" in str(kind.options):
        options["targets"] = ("qkv_proj",)
    adapter = save_random_adapter(base, tmp_path / "one", seed=rng.randrange(2**32), **options)
    runner = load(base)
    loaded = runner.load_adapter(adapter, max_rank=64)
    oracle, plain = merged(base, adapter, kind.scale), load(base)
    text = make_text(rng)
    with torch.no_grad():
        expected = oracle(torch.tensor([text])).logits[0]
    found = alone(runner, text, loaded)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)
    assert (found - alone(plain, text, None)).abs().max() > 0.1, "the adapter changes nothing"


def test_greedy_outputs_are_those_of_the_merged_model(tmp_path: Path, rng: random.Random) -> None:
    adapter = save_random_adapter(TINY_MODEL, tmp_path / "one", seed=5)
    runner = load(TINY_MODEL)
    loaded = runner.load_adapter(adapter, max_rank=64)
    oracle = merged(TINY_MODEL, adapter, lambda _: 2.0)
    num_ties = num_changed = 0
    for _ in range(24):
        prompt = make_text(rng, rng.randint(1, 12))
        found = greedily(runner, prompt, loaded, 24)
        with torch.no_grad():
            logits = oracle(torch.tensor([prompt + found])).logits[0]
        for position, token_id in enumerate(found, start=len(prompt) - 1):
            best = logits[position].topk(2)
            if int(best.indices[0]) != token_id:
                assert best.values[0] - logits[position, token_id] < 1e-4, (prompt, found, position)
                num_ties += 1
        plain = alone(runner, prompt + found, None)[len(prompt) - 1 : -1].argmax(-1).tolist()
        num_changed += plain != found
    print(f"{num_ties} ties; {num_changed} of 24 outputs differ from the base model's")
    assert num_changed >= 20


@pytest.mark.parametrize("exact", [False, True])
def test_a_mixed_batch_is_each_alone(base: Path, exact: bool, tmp_path: Path, rng: random.Random) -> None:
    runner, targets = load(base, exact=exact), targets_of(base)
    kinds: list[dict[str, Any]] = [{"rank": 1}, {"rank": 9, "targets": targets[:1]}, {"rank": 16}]
    adapters: list[LoraWeights | None] = [None]
    for seed, options in enumerate(kinds):
        folder = save_random_adapter(base, tmp_path / f"{seed}", seed=seed, **{"targets": targets, **options})
        adapters.append(runner.load_adapter(folder, max_rank=64))
    texts = [make_text(rng, rng.choice((1, 7, 20, 33, 50))) for _ in range(12)]
    chosen = [adapters[index % 4] for index in range(12)]
    mixed = Mix(runner, texts, chosen, rng).logits()
    for text, adapter, found in zip(texts, chosen, mixed, strict=True):
        expected = alone(runner, text, adapter)
        if exact:
            assert torch.equal(found, expected)
        else:
            torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)


def drop(name: str) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
    return lambda tensors: {key: value for key, value in tensors.items() if name not in key}


def add(name: str, *shape: int) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
    return lambda tensors: tensors | {name: torch.zeros(*shape)}


Q0 = "base_model.model.model.layers.0.self_attn.q_proj"
BAD: dict[str, tuple[Callable[[Path], object], str]] = {
    "no config": (lambda p: (p / "adapter_config.json").unlink(), r"it has no adapter_config\.json"),
    "no json": (lambda p: (p / "adapter_config.json").write_text("{"), "not valid json"),
    "no weights": (
        lambda p: (p / "adapter_model.safetensors").unlink(),
        r"it has no adapter_model\.safetensors$",
    ),
    "pickled": (
        lambda p: (p / "adapter_model.safetensors").rename(p / "adapter_model.bin"),
        "no adapter_model.safetensors but a pickled one, which could run code",
    ),
    "cut short": (
        lambda p: (p / "adapter_model.safetensors").write_bytes(
            (p / "adapter_model.safetensors").read_bytes()[:-9]
        ),
        r"adapter_model\.safetensors is not a whole safetensors file",
    ),
    "empty": (lambda p: edit_tensors(p, lambda _: {}), f"tensor {Q0}.lora_A.weight is missing"),
    "another method": (lambda p: edit_config(p, peft_type="IA3"), "peft_type = IA3 is not supported"),
    "dora": (lambda p: edit_config(p, use_dora=True), "use_dora = True is not supported"),
    "bias": (lambda p: edit_config(p, bias="lora_only"), "bias = lora_only is not supported"),
    "modules": (
        lambda p: edit_config(p, modules_to_save=["lm_head"]),
        r"modules_to_save = \['lm_head'\] is not supported",
    ),
    "pissa": (lambda p: edit_config(p, init_lora_weights="pissa"), "init_lora_weights = pissa is not supp"),
    "from the future": (lambda p: edit_config(p, use_xyz=3), "use_xyz = 3 is not supported"),
    "no rank": (lambda p: edit_config(p, r=0), "Expected `int` >= 1"),
    "rank": (lambda p: edit_config(p, r=65), "its rank is 65; this worker takes at most 64"),
    "rank of a module": (lambda p: edit_config(p, rank_pattern={"q_proj": 99}), "its rank is 99"),
    "another rank": (
        lambda p: edit_config(p, r=8),
        rf"tensor {Q0}.lora_A.weight has shape \(4, 96\); base model and config ask for \(8, 96\)",
    ),
    "alpha": (lambda p: edit_config(p, lora_alpha=float("nan")), "lora_alpha is nan"),
    "pattern": (
        lambda p: edit_config(p, alpha_pattern={"(a+)+q_proj": 3}),
        r"alpha_pattern has '\(a\+\)\+q_proj'; only names of modules are supported",
    ),
    "half a pair": (
        lambda p: edit_tensors(p, drop("0.self_attn.q_proj.lora_B")),
        f"tensor {Q0}.lora_B.weight is missing",
    ),
    "a module less": (lambda p: edit_tensors(p, drop("layers.3.mlp.up")), "3.mlp.up_proj.lora_A.weight is m"),
    "head": (
        lambda p: edit_tensors(p, add("base_model.model.lm_head.lora_A.weight", 4, 96)),
        r"1 of 57 tensors belong to nothing that can be adapted .*: base_model\.model\.lm_head",
    ),
    "embedding": (
        lambda p: edit_tensors(p, add("base_model.model.model.embed_tokens.lora_embedding_A", 4, 640)),
        "1 of 57 tensors .*lora_embedding_A",
    ),
    "more layers": (
        lambda p: edit_tensors(p, add("base_model.model.model.layers.4.mlp.up_proj.lora_A.weight", 4, 96)),
        r"1 of 57 tensors .*layers\.4\.mlp",
    ),
    "not finite": (
        lambda p: edit_tensors(p, lambda tensors: {k: v * torch.nan for k, v in tensors.items()}),
        rf"tensor {Q0}.lora_A.weight has numbers that are not finite",
    ),
    "too large": (
        lambda p: edit_tensors(p, add("x", 2_000_000)),
        r"adapter_model\.safetensors has \d+ bytes; within max_adapter_rank it needs \d+",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_not_supported_is_refused_by_name(name: str, tmp_path: Path) -> None:
    spoil, message = BAD[name]
    adapter = save_random_adapter(TINY_MODEL, tmp_path / "one", seed=0)
    spoil(adapter)
    with pytest.raises(ModelError, match=message):
        load(TINY_MODEL).load_adapter(adapter, max_rank=64)


def test_an_adapter_of_another_base_is_refused_with_both_shapes(tmp_path: Path) -> None:
    save_random_model(CONFIGS["llama"](), tmp_path / "llama")
    adapter = save_random_adapter(tmp_path / "llama", tmp_path / "one", seed=0, target_modules=None)
    with pytest.raises(ModelError, match=r"has shape \(4, 48\); base model and config ask for \(4, 96\)"):
        load(TINY_MODEL).load_adapter(adapter, max_rank=64)


def test_layers_that_were_left_out_on_purpose_are_not_missing(tmp_path: Path) -> None:
    adapter = save_random_adapter(TINY_MODEL, tmp_path / "one", seed=0, layers_to_transform=[1, 2])
    edit_tensors(
        adapter, lambda tensors: {k: v for k, v in tensors.items() if ".1." in k or "layers.2." in k}
    )
    loaded = load(TINY_MODEL).load_adapter(adapter, max_rank=64)
    assert [layer.qkv is not None for layer in loaded.layers] == [False, True, True, False]


def test_the_digest_shows_every_change(tmp_path: Path) -> None:
    runner = load(TINY_MODEL)
    first = save_random_adapter(TINY_MODEL, tmp_path / "one", seed=1)
    again = save_random_adapter(TINY_MODEL, tmp_path / "two", seed=1, lora_dropout=0.5)
    other = save_random_adapter(TINY_MODEL, tmp_path / "three", seed=2)
    scaled = save_random_adapter(TINY_MODEL, tmp_path / "four", seed=1, alpha=9)
    digests = [runner.load_adapter(path, max_rank=64).digest for path in (first, again, other, scaled)]
    assert digests[0] == digests[1]
    assert len(set(digests)) == 3
