"""LoRA adapters with random weights, written as PEFT writes them, and the base models that they make."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

PREFIX = "base_model.model."
ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
FUSED = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")


class Pair(NamedTuple):
    """A module's matrices."""

    module: str
    lora_a: Tensor  # [r, K]
    lora_b: Tensor  # [N, r]


def save_random_adapter(
    base: Path,
    folder: Path,
    *,
    seed: int,
    rank: int = 4,
    alpha: float = 8,
    targets: tuple[str, ...] = ALL,
    rank_of: Callable[[str], int] | None = None,
    strength: float = 0.1,
    **fields: Any,
) -> Path:
    """An adapter of `base` that changes what it says; `fields` go into its config."""
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, Tensor] = {}
    for module, (rows, columns) in _linear_shapes(base, targets):
        module_rank = rank if rank_of is None else rank_of(module)
        lora_a = torch.randn(module_rank, columns, generator=generator) / columns**0.5
        lora_b = torch.randn(rows, module_rank, generator=generator) * strength
        tensors[f"{PREFIX}{module}.lora_A.weight"] = lora_a
        tensors[f"{PREFIX}{module}.lora_B.weight"] = lora_b
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": 0.05,
        "target_modules": list(targets),
        "bias": "none",
        "use_rslora": False,
        "use_dora": False,
        "rank_pattern": {},
        "alpha_pattern": {},
        "init_lora_weights": True,
        "modules_to_save": None,
    }
    (folder / "adapter_config.json").write_text(json.dumps(config | fields))
    return folder


def pairs(adapter: Path) -> Iterator[Pair]:
    """What an adapter's file holds."""
    tensors = load_file(adapter / "adapter_model.safetensors")
    for name, lora_a in tensors.items():
        module = name.removeprefix(PREFIX).removesuffix(".lora_A.weight")
        if module != name.removeprefix(PREFIX):
            yield Pair(module, lora_a, tensors[name.replace("lora_A", "lora_B")])


def merged(base: Path, adapter: Path | None, scale_of: Callable[[str], float]) -> PreTrainedModel:
    """The slow, obvious way: W + scale · B · A in float32, on transformers."""
    model = AutoModelForCausalLM.from_pretrained(base, attn_implementation="eager", dtype=torch.float32)
    for module, lora_a, lora_b in () if adapter is None else pairs(adapter):
        weight = model.get_submodule(module).weight
        with torch.no_grad():
            weight += scale_of(module) * (lora_b @ lora_a)
    return model.eval()


def edit_tensors(adapter: Path, change: Callable[[dict[str, Tensor]], Mapping[str, Tensor]]) -> None:
    """Write an adapter's tensors anew."""
    path = adapter / "adapter_model.safetensors"
    save_file(dict(change(load_file(path))), path)


def edit_config(adapter: Path, **fields: Any) -> None:
    """Write fields of an adapter's config anew."""
    path = adapter / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def _linear_shapes(base: Path, targets: tuple[str, ...]) -> Iterator[tuple[str, tuple[int, int]]]:
    for name, tensor in load_file(base / "model.safetensors").items():
        module = name.removesuffix(".weight")
        if module.rpartition(".")[2] in targets:
            yield module, (tensor.shape[0], tensor.shape[1])
