"""What cannot run on pages is refused at load, by name and with the reason."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import (
    BertConfig,
    BloomConfig,
    CamembertConfig,
    DeepseekV3Config,
    DiffLlamaConfig,
    DogeConfig,
    Lfm2Config,
    Llama4TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    Phi3Config,
    PhiConfig,
    PreTrainedConfig,
    T5Config,
    ViTConfig,
)

from chairlift_client.errors import ModelError
from chairlift_worker.engine.batch import Chunk
from chairlift_worker.models.architectures import context_tokens
from chairlift_worker.models.fallback import FallbackRunner
from random_models import FAMILIES, save_random_model

TINY = {
    "vocab_size": 31,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "intermediate_size": 16,
    "max_position_embeddings": 32,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def load(folder: Path) -> FallbackRunner:
    return FallbackRunner.load(
        folder, num_blocks=4, block_size=4, dtype=torch.float32, device=torch.device("cpu")
    )


# Refused by what the config and the class declare: there are no weights to load.
@pytest.mark.parametrize(
    ("config", "message"),
    [
        (MambaConfig(architectures=["MambaForCausalLM"]), "MambaForCausalLM .* recurrent state"),
        (T5Config(architectures=["T5ForConditionalGeneration"]), "T5ForCond.* encoder-decoder"),
        (BloomConfig(architectures=["BloomForCausalLM"]), "BloomForCausalLM .* attention interface"),
        (ViTConfig(architectures=["ViTModel"]), "ViTModel .* no causal language model"),
        (Lfm2Config(**TINY, layer_types=["conv", "full_attention"]), "lfm2 .* layers of type conv"),
        (Llama4TextConfig(**TINY), "llama4_text .* layers of type chunked_attention"),
    ],
    ids=lambda value: value.model_type if isinstance(value, PreTrainedConfig) else None,
)
def test_declared(config: PreTrainedConfig, message: str, tmp_path: Path) -> None:
    config.save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=message):
        load(tmp_path)


# Refused by what the layers ask for when the model runs.
@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            DeepseekV3Config(**TINY, head_dim=4, qk_rope_head_dim=4, qk_nope_head_dim=8, v_head_dim=6),
            "DeepseekV3ForCausalLM .* keys of 2 heads and 12 dimensions but values of 2 heads and 6",
        ),
        (DiffLlamaConfig(**TINY), "DiffLlamaForCausalLM .* used 2 times for each token"),
        (BertConfig(**TINY), "BertLMHeadModel .* neither causal nor causal with a fixed window"),
        # Adds to its mask what each token's values say.
        (DogeConfig(**TINY), "DogeForCausalLM .* neither causal nor causal with a fixed window"),
        (CamembertConfig(**TINY, is_decoder=True), "CamembertForCausalLM .* count positions from 0"),
    ],
    ids=lambda value: value.model_type if isinstance(value, PreTrainedConfig) else None,
)
def test_found_by_running(config: PreTrainedConfig, message: str, tmp_path: Path) -> None:
    save_random_model(config, tmp_path)
    with pytest.raises(ModelError, match=message):
        load(tmp_path)


def test_layers_that_mix_tokens_outside_the_attention(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A convolution that no config declares would let one job's tokens reach another's."""
    save_random_model(FAMILIES["llama"](), tmp_path)
    plain = LlamaForCausalLM.__init__

    def with_convolution(self: LlamaForCausalLM, config: LlamaConfig) -> None:
        plain(self, config)
        norm = self.model.norm.forward
        self.model.norm.forward = lambda hidden: norm(hidden + 1e-3 * hidden.roll(1, dims=1))

    monkeypatch.setattr(LlamaForCausalLM, "__init__", with_convolution)
    with pytest.raises(ModelError, match=r"LlamaForCausalLM .* more than attention"):
        load(tmp_path)


def test_no_config(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no config"):
        load(tmp_path)


def test_no_weights(tmp_path: Path) -> None:
    FAMILIES["llama"]().save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="cannot load"):
        load(tmp_path)


def test_pickled_weights_are_not_read(tmp_path: Path) -> None:
    config = FAMILIES["llama"]()
    config.save_pretrained(tmp_path)
    torch.save(LlamaForCausalLM(config).state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(ModelError, match="cannot load"):
        load(tmp_path)


def test_a_context_that_turns_with_its_length_ends_where_it_would_turn() -> None:
    rope = {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "short_factor": [1.0] * 4,
        "long_factor": [2.0] * 4,
        "original_max_position_embeddings": 16,
    }
    config = Phi3Config(**TINY, pad_token_id=0, original_max_position_embeddings=16, rope_parameters=rope)
    assert context_tokens(config) == 16
    assert context_tokens(LlamaConfig(**TINY)) == 32


def test_a_context_filled_to_the_last_token_turns_nothing(tmp_path: Path) -> None:
    """Past the end "dynamic" turns every position of a step; the runner's context keeps all steps before."""
    rope = {"rope_type": "dynamic", "rope_theta": 100.0, "factor": 4.0}
    save_random_model(PhiConfig(**TINY, rope_parameters=rope), tmp_path)
    runner = FallbackRunner.load(
        tmp_path, num_blocks=6, block_size=8, dtype=torch.float32, device=torch.device("cpu")
    )
    assert runner.spec.context_tokens == TINY["max_position_embeddings"] == 32
    short = Chunk((5, 6, 7), 0, (4,), 3)
    alone = runner.forward([short])
    full = Chunk((9,) * 32, 0, (0, 1, 2, 3), 1)
    torch.testing.assert_close(runner.forward([short, full])[:3], alone, atol=1e-5, rtol=0)
    beyond = Chunk((9,) * 40, 0, (0, 1, 2, 3, 5), 1)
    assert (runner.forward([short, beyond])[:3] - alone).abs().max() > 1e-3


def test_two_models_in_one_process_do_not_meet(tmp_path: Path) -> None:
    for name in ("opt", "gemma2"):
        save_random_model(FAMILIES[name](), tmp_path / name)
    first = load(tmp_path / "opt")
    chunks = [Chunk((5, 6, 7), 0, (2,), 3)]
    alone = first.forward(chunks)
    second = load(tmp_path / "gemma2")
    second.forward(chunks)
    assert torch.equal(first.forward(chunks), alone)
