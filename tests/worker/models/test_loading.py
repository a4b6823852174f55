"""From a name to a model that runs: sources, choice of runner, limits, fingerprint."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from chairlift_client.errors import ConfigError, ModelError
from chairlift_worker.engine.batch import Chunk
from chairlift_worker.models.architectures import read_config
from chairlift_worker.models.checkpoint import eos_token_ids
from chairlift_worker.models.decoder import DecoderRunner
from chairlift_worker.models.fallback import FallbackRunner
from chairlift_worker.models.fingerprint import fingerprint
from chairlift_worker.models.loading import load_model
from chairlift_worker.models.memory import kv_bytes_per_token
from chairlift_worker.models.source import default_cache, resolve
from random_models import FAMILIES, save_random_model
from tiny_model import TINY_MODEL


@pytest.fixture
def tiny_copy(tmp_path: Path) -> Path:
    folder = tmp_path / "tiny"
    shutil.copytree(TINY_MODEL, folder)
    return folder


def edit(path: Path, **changes: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_a_folder_of_the_llama_shape() -> None:
    model = load_model(str(TINY_MODEL), kv_tokens=100)
    assert isinstance(model.runner, DecoderRunner)
    assert model.architecture == "LlamaForCausalLM"
    assert model.dtype == torch.float32
    assert model.runner.spec == (640, 1024, 7, 16, frozenset({0, 2}))
    assert (model.info.context_tokens, model.info.pool_tokens) == (1024, 113)
    assert model.info.fingerprint == model.fingerprint
    ids = model.tokenizer.encode_prompt("Once upon a time")
    logits = model.runner.forward([Chunk(ids, 0, (3,), 1)])
    assert logits.shape == (1, 640)


def test_other_shapes_run_through_transformers(tmp_path: Path) -> None:
    save_random_model(FAMILIES["gpt2"](), tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TINY_MODEL / name, tmp_path / name)
    model = load_model(str(tmp_path), kv_tokens=64)
    assert isinstance(model.runner, FallbackRunner)
    assert model.architecture == "GPT2LMHeadModel"


def test_exact_is_for_the_decoder(tmp_path: Path) -> None:
    exact, plain = (load_model(str(TINY_MODEL), kv_tokens=64, exact=exact) for exact in (True, False))
    chunk = Chunk((3, 4, 5), 0, (1,), 3)
    torch.testing.assert_close(
        exact.runner.forward([chunk]), plain.runner.forward([chunk]), atol=1e-4, rtol=0
    )
    assert exact.fingerprint != plain.fingerprint
    save_random_model(FAMILIES["gpt2"](), tmp_path)
    with pytest.raises(ConfigError, match="exact needs the decoder: GPT2LMHeadModel"):
        load_model(str(tmp_path), kv_tokens=64, exact=True)


def test_a_pool_that_nobody_sized() -> None:
    assert load_model(str(TINY_MODEL), num_sequences=3).info.pool_tokens == 3 * 1024 + 1
    assert load_model(str(TINY_MODEL), num_sequences=1, max_context_tokens=100).info.pool_tokens == 1024 + 1


def test_a_shorter_context(tiny_copy: Path) -> None:
    model = load_model(str(tiny_copy), kv_tokens=64, max_context_tokens=48)
    assert model.runner.spec.context_tokens == model.info.context_tokens == 48
    assert model.runner.forward([Chunk((3, 4), 0, (0,), 2)]).shape == (2, 640)
    assert model.fingerprint != load_model(str(tiny_copy), kv_tokens=64).fingerprint
    with pytest.raises(ConfigError, match="context_tokens is 1025; the model was made for 1024"):
        load_model(str(tiny_copy), max_context_tokens=1025)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"dtype": "int8"}, "int8"),
        ({"device": "abacus"}, "abacus"),
        ({"device": "cuda:99"}, "device is 'cuda:99'"),
    ],
)
def test_settings_that_do_not_exist(setting: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_model(str(TINY_MODEL), **setting)  # type: ignore[arg-type]


def test_what_does_not_fit_is_refused_before_it_is_loaded() -> None:
    too_many = psutil.virtual_memory().total // (2 * 4 * 2 * 24 * 4)
    with pytest.raises(
        ModelError, match=rf"KV for {-(-too_many // 16) * 16} tokens of .* GiB .* lower kv_tokens"
    ):
        load_model(str(TINY_MODEL), kv_tokens=too_many)


def test_kv_bytes_are_those_of_the_cache() -> None:
    assert kv_bytes_per_token(read_config(TINY_MODEL), torch.float16) == 2 * 4 * 2 * 24 * 2


def test_sources_that_are_not_there(tmp_path: Path) -> None:
    text = tmp_path / "model.txt"
    text.write_text("x")
    for source, message in (
        (str(tmp_path / "nowhere"), "no such folder"),
        ("./nowhere", "no such folder"),
        ("a/b/c", "no such folder"),
        ("two words", "no such folder"),
        (str(tmp_path / "missing.gguf"), "no such file"),
        (str(text), "neither a folder nor"),
    ):
        with pytest.raises(ModelError, match=message):
            resolve(source, cache=tmp_path)


def test_a_gguf_file_that_is_none(tmp_path: Path) -> None:
    (tmp_path / "broken.gguf").write_bytes(b"GGML" * 10)
    with pytest.raises(ModelError, match=r"broken\.gguf"):
        load_model(str(tmp_path / "broken.gguf"), cache=tmp_path / "cache")


@pytest.fixture
def offline_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The hub's own cache, empty, and no network."""
    cache = tmp_path / "hub"
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cache))
    return cache


def test_a_hub_id_that_cannot_be_had(offline_hub: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="nobody/nothing: no such folder, and not to be had from the hub: "):
        resolve("nobody/nothing", cache=tmp_path)


@pytest.mark.parametrize("source", ["someone/tiny", "someone/tiny@main", "someone/tiny@" + "a" * 40])
def test_a_hub_id_that_was_fetched_before(offline_hub: Path, tmp_path: Path, source: str) -> None:
    repository = offline_hub / "models--someone--tiny"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("a" * 40)
    shutil.copytree(TINY_MODEL, repository / "snapshots" / ("a" * 40))
    assert load_model(source, kv_tokens=16).architecture == "LlamaForCausalLM"


def test_the_cache_follows_the_users_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/var/tmp/cache")
    assert default_cache() == Path("/var/tmp/cache/chairlift/models")


def test_eos_ids_are_those_of_all_files(tiny_copy: Path) -> None:
    edit(tiny_copy / "generation_config.json", eos_token_id=7)
    edit(tiny_copy / "config.json", eos_token_id=[8, 9])
    edit(tiny_copy / "tokenizer_config.json", eos_token={"content": "<|im_start|>"})
    assert eos_token_ids(tiny_copy) == {7, 8, 9, 1}
    edit(tiny_copy / "tokenizer_config.json", eos_token=None)
    (tiny_copy / "generation_config.json").unlink()
    edit(tiny_copy / "config.json", eos_token_id=None, text_config={"eos_token_id": 5})
    assert eos_token_ids(tiny_copy) == {5}


def test_broken_json_is_told(tiny_copy: Path) -> None:
    (tiny_copy / "generation_config.json").write_text("{")
    with pytest.raises(ModelError, match=r"generation_config\.json: not valid json"):
        eos_token_ids(tiny_copy)


def test_the_fingerprint_shows_every_change(tiny_copy: Path) -> None:
    seen = {take_fingerprint(tiny_copy), take_fingerprint(tiny_copy)}
    assert len(seen) == 1, "twice the same"
    seen.add(take_fingerprint(tiny_copy, dtype=torch.bfloat16))
    seen.add(take_fingerprint(tiny_copy, context_tokens=99))
    edit(tiny_copy / "tokenizer_config.json", chat_template="{{ messages }}")
    seen.add(take_fingerprint(tiny_copy))
    edit(tiny_copy / "config.json", rms_norm_eps=1e-3)
    seen.add(take_fingerprint(tiny_copy))
    (tiny_copy / "chat_template.jinja").write_text("x")
    seen.add(take_fingerprint(tiny_copy))
    weights = tiny_copy / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-5] ^= 1
    weights.write_bytes(content)
    seen.add(take_fingerprint(tiny_copy))
    assert len(seen) == 7
    (tiny_copy / "README.md").write_text("words only")
    assert take_fingerprint(tiny_copy) in seen


def take_fingerprint(folder: Path, **changes: Any) -> str:
    return fingerprint(folder, **{"dtype": torch.float32, "context_tokens": 128, **changes})
