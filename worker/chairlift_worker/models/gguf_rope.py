"""Rotary embedding settings of a GGUF file, as transformers' `rope_parameters`."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from chairlift_client.errors import ModelError
from chairlift_worker.models.gguf_file import GgufFile

_LLAMA3_LOW, _LLAMA3_HIGH, _LLAMA3_CONTEXT = 1.0, 4.0, 8192
"""What every Llama 3.1 to 3.3 was trained with; a GGUF file keeps only the resulting divisors."""


def rope_parameters(file: GgufFile, head_dim: int, default_theta: float) -> dict[str, object]:
    """The rope_parameters entry; ModelError for a scaling that cannot be expressed."""
    prefix = f"{file.architecture}.rope"
    theta = file.number(f"{prefix}.freq_base", default_theta)
    base: dict[str, object] = {"rope_theta": theta}
    if "rope_freqs.weight" in file.tensors:
        divisors = file.read(file.tensors["rope_freqs.weight"])
        return base | _llama3_scaling(file, divisors, head_dim, theta)
    kind = file.text(f"{prefix}.scaling.type", "none")
    if kind == "none":
        return base | {"rope_type": "default"}
    scaled = base | {"rope_type": kind, "factor": file.number(f"{prefix}.scaling.factor")}
    if kind == "linear":
        return scaled
    if kind == "yarn":
        original = file.integer(f"{prefix}.scaling.original_context_length")
        return scaled | {"original_max_position_embeddings": original}
    raise ModelError(f"{file.path}: rope scaling {kind!r} is not supported")


def _llama3_scaling(
    file: GgufFile, divisors: NDArray[np.float32], head_dim: int, theta: float
) -> dict[str, object]:
    """Finds the factor that the divisors [head_dim / 2] were made with, and makes sure of it."""
    factor = float(divisors.max())
    expected = _llama3_divisors(factor, head_dim, theta)
    if divisors.shape != expected.shape or not np.allclose(divisors, expected, rtol=1e-3):
        raise ModelError(f"{file.path}: its rope frequency factors are not those of Llama 3 scaling")
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": _LLAMA3_LOW,
        "high_freq_factor": _LLAMA3_HIGH,
        "original_max_position_embeddings": _LLAMA3_CONTEXT,
    }


def _llama3_divisors(factor: float, head_dim: int, theta: float) -> NDArray[np.float64]:
    """By what each frequency is divided: 1 for the fast, `factor` for the slow, a blend between.

    Source: the Llama 3.1 model card's rope scaling.
    """
    wavelengths = 2 * math.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    turns = _LLAMA3_CONTEXT / wavelengths
    smooth = np.clip((turns - _LLAMA3_LOW) / (_LLAMA3_HIGH - _LLAMA3_LOW), 0.0, 1.0)
    divisors: NDArray[np.float64] = 1 / ((1 - smooth) / factor + smooth)
    return divisors
