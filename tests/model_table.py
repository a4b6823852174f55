"""What docs/models.md says of each architecture, as data: its rows are these, and each is tried out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

from transformers import (
    ApertusConfig,
    ArceeConfig,
    BertConfig,
    BloomConfig,
    Cohere2Config,
    CohereConfig,
    DeepseekV3Config,
    DiffLlamaConfig,
    Ernie4_5Config,
    FalconConfig,
    FalconH1Config,
    Gemma2Config,
    Gemma3TextConfig,
    Glm4Config,
    Glm4MoeConfig,
    GlmConfig,
    GPTBigCodeConfig,
    GraniteConfig,
    JambaConfig,
    Lfm2Config,
    Llama4TextConfig,
    LlamaConfig,
    MambaConfig,
    MinistralConfig,
    MistralConfig,
    MptConfig,
    NemotronConfig,
    Olmo2Config,
    Olmo3Config,
    OlmoConfig,
    Phi3Config,
    PhimoeConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
    RwkvConfig,
    SeedOssConfig,
    SmolLM3Config,
    StableLmConfig,
    Starcoder2Config,
    T5Config,
)

from random_models import FAMILIES

RunsOn = Literal["decoder", "transformers", "refused"]


class Row(NamedTuple):
    """An architecture, as a config names it."""

    architecture: str
    models: str
    """Some that people know."""
    runs_on: RunsOn
    config: Callable[[], PreTrainedConfig]
    """A small one."""
    reason: str = ""
    """Why it is refused, in the words of the error unless that is given too."""
    error: str = ""

    def line(self) -> str:
        """As it stands on the page."""
        last = self.reason if self.runs_on == "refused" else self.runs_on
        return f"| `{self.architecture}` | {self.models} | {last} |"


_BASE: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
_MIXED = {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]}
_NOT_THE_INTERFACE = "its attention does not go through transformers' attention interface"
_RECURRENT = "it carries a recurrent state from token to token, not only K and V"


def _small(config: type[PreTrainedConfig], **changes: Any) -> Callable[[], PreTrainedConfig]:
    return lambda: config(**(_BASE | changes))


ROWS: tuple[Row, ...] = (
    Row("LlamaForCausalLM", "Llama 2 and 3, SmolLM 1 and 2, TinyLlama, Yi", "decoder", _small(LlamaConfig)),
    Row("MistralForCausalLM", "Mistral", "decoder", _small(MistralConfig, sliding_window=5)),
    Row("Qwen2ForCausalLM", "Qwen 2 and 2.5", "decoder", _small(Qwen2Config)),
    Row("Qwen3ForCausalLM", "Qwen 3", "decoder", _small(Qwen3Config, head_dim=12)),
    Row("SmolLM3ForCausalLM", "SmolLM 3", "decoder", _small(SmolLM3Config, no_rope_layers=[1, 0])),
    Row("Phi3ForCausalLM", "Phi 3, 3.5 and 4", "decoder", _small(Phi3Config, sliding_window=5)),
    Row("Gemma2ForCausalLM", "Gemma 2", "decoder", _small(Gemma2Config, **_MIXED, head_dim=12)),
    Row("Gemma3ForCausalLM", "Gemma 3, text", "decoder", _small(Gemma3TextConfig, **_MIXED, head_dim=12)),
    Row("ApertusForCausalLM", "Apertus", "transformers", _small(ApertusConfig)),
    Row("ArceeForCausalLM", "AFM", "transformers", _small(ArceeConfig)),
    Row("CodeGenForCausalLM", "CodeGen", "transformers", FAMILIES["codegen"]),
    Row("CohereForCausalLM", "Command R", "transformers", _small(CohereConfig)),
    Row("Cohere2ForCausalLM", "Command R7B, Command A", "transformers", _small(Cohere2Config, **_MIXED)),
    Row("Ernie4_5ForCausalLM", "Ernie 4.5", "transformers", _small(Ernie4_5Config)),
    Row("GPT2LMHeadModel", "GPT-2, DistilGPT2", "transformers", FAMILIES["gpt2"]),
    Row("GPTBigCodeForCausalLM", "StarCoder, SantaCoder", "transformers", _small(GPTBigCodeConfig)),
    Row("GPTJForCausalLM", "GPT-J", "transformers", FAMILIES["gptj"]),
    Row("GPTNeoXForCausalLM", "Pythia, GPT-NeoX", "transformers", FAMILIES["gpt_neox"]),
    Row("GemmaForCausalLM", "Gemma 1", "transformers", FAMILIES["gemma"]),
    Row("GlmForCausalLM", "GLM 4 (2024)", "transformers", _small(GlmConfig, head_dim=8)),
    Row("Glm4ForCausalLM", "GLM 4 (2025)", "transformers", _small(Glm4Config, head_dim=8)),
    Row("Glm4MoeForCausalLM", "GLM 4.5", "transformers", _small(Glm4MoeConfig, **_EXPERTS, head_dim=8)),
    Row("GptOssForCausalLM", "GPT-OSS", "transformers", FAMILIES["gpt_oss"]),
    Row("GraniteForCausalLM", "Granite 3", "transformers", _small(GraniteConfig)),
    Row(
        "MinistralForCausalLM",
        "Ministral",
        "transformers",
        _small(MinistralConfig, **_MIXED, head_dim=8),
    ),
    Row("MixtralForCausalLM", "Mixtral", "transformers", FAMILIES["mixtral"]),
    Row("NemotronForCausalLM", "Nemotron 3 and 4, Minitron", "transformers", _small(NemotronConfig)),
    Row("OPTForCausalLM", "OPT", "transformers", FAMILIES["opt"]),
    Row("OlmoForCausalLM", "OLMo 1", "transformers", _small(OlmoConfig)),
    Row("Olmo2ForCausalLM", "OLMo 2", "transformers", _small(Olmo2Config)),
    Row("Olmo3ForCausalLM", "OLMo 3", "transformers", _small(Olmo3Config, **_MIXED)),
    Row("PhiForCausalLM", "Phi 1, 1.5 and 2", "transformers", FAMILIES["phi"]),
    Row("PhimoeForCausalLM", "Phi 3.5 MoE", "transformers", _small(PhimoeConfig, num_local_experts=4)),
    Row("Qwen2MoeForCausalLM", "Qwen 1.5 and 2 MoE", "transformers", FAMILIES["qwen2_moe"]),
    Row("Qwen3MoeForCausalLM", "Qwen 3 MoE", "transformers", _small(Qwen3MoeConfig, **_EXPERTS)),
    Row("SeedOssForCausalLM", "Seed-OSS", "transformers", _small(SeedOssConfig)),
    Row("Starcoder2ForCausalLM", "StarCoder 2", "transformers", _small(Starcoder2Config)),
    Row(
        "BertLMHeadModel",
        "BERT",
        "refused",
        _small(BertConfig),
        "its mask is neither causal nor causal with a fixed window",
    ),
    Row("BloomForCausalLM", "BLOOM", "refused", BloomConfig, _NOT_THE_INTERFACE),
    Row(
        "DeepseekV3ForCausalLM",
        "DeepSeek V3, R1",
        "refused",
        _small(DeepseekV3Config, head_dim=4, qk_rope_head_dim=4, qk_nope_head_dim=8, v_head_dim=6),
        "its keys and values differ in size (multi-head latent attention)",
        error="it has keys of 6 heads and 12 dimensions but values of 6 heads and 6 dimensions",
    ),
    Row(
        "DiffLlamaForCausalLM",
        "DiffLlama",
        "refused",
        _small(DiffLlamaConfig),
        "one attention layer is used 2 times for each token",
    ),
    Row("FalconForCausalLM", "Falcon 1 and 2", "refused", FalconConfig, _NOT_THE_INTERFACE),
    Row("FalconH1ForCausalLM", "Falcon H1", "refused", FalconH1Config, _RECURRENT),
    Row("JambaForCausalLM", "Jamba", "refused", JambaConfig, _RECURRENT),
    Row(
        "Lfm2ForCausalLM",
        "LFM 2",
        "refused",
        _small(Lfm2Config, layer_types=["conv", "full_attention"]),
        "it has layers of type conv",
    ),
    Row(
        "Llama4ForCausalLM",
        "Llama 4, text",
        "refused",
        Llama4TextConfig,
        "it has layers of type chunked_attention",
    ),
    Row("MambaForCausalLM", "Mamba", "refused", MambaConfig, _RECURRENT),
    Row("MptForCausalLM", "MPT", "refused", MptConfig, _NOT_THE_INTERFACE),
    Row("Qwen3NextForCausalLM", "Qwen 3 Next", "refused", Qwen3NextConfig, _RECURRENT),
    Row("RwkvForCausalLM", "RWKV 4", "refused", RwkvConfig, _RECURRENT),
    Row("StableLmForCausalLM", "StableLM", "refused", StableLmConfig, _NOT_THE_INTERFACE),
    Row(
        "T5ForConditionalGeneration",
        "T5, FLAN-T5",
        "refused",
        T5Config,
        "it is an encoder-decoder: its decoder attends to a second, encoded input",
    ),
)
