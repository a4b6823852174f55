"""Whether a model and its KV cache fit, asked before anything is loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import psutil
import torch
from transformers import PreTrainedConfig

from chairlift_client.errors import ModelError
from chairlift_worker.models.checkpoint import weight_files

_GIB = 1 << 30


def kv_bytes_per_token(config: PreTrainedConfig, dtype: torch.dtype) -> int:
    """K and V of one token in all layers."""
    text: Any = config.get_text_config(decoder=True)
    num_kv_heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    return int(2 * text.num_hidden_layers * num_kv_heads * head_dim * dtype.itemsize)


def check_fits(
    folder: Path, config: PreTrainedConfig, *, kv_tokens: int, dtype: torch.dtype, device: torch.device
) -> None:
    """Raise ModelError, with the numbers, if weights and KV need more than the device has free.

    Weights are counted as they lie on disk, which is an estimate where `dtype` is another than theirs.
    """
    weights = sum(path.stat().st_size for path in weight_files(folder))
    cache = kv_tokens * kv_bytes_per_token(config, dtype)
    free = _free_bytes(device)
    if weights + cache > free:
        raise ModelError(
            f"weights of {weights / _GIB:.2f} GiB and KV for {kv_tokens} tokens of {cache / _GIB:.2f} GiB "
            f"are more than the {free / _GIB:.2f} GiB that {device} has free: lower kv_tokens"
        )


def _free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return int(psutil.virtual_memory().available)
