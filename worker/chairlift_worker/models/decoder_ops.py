"""The two sets of ops that the lean decoder computes with: the fastest, and those exact to the last bit."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from chairlift_client.errors import ConfigError
from chairlift_kernels import Attention, exact, prepare_attention, silu_mul
from chairlift_worker.models.decoder_weights import DecoderWeights


class Ops(NamedTuple):
    """Those whose rows might depend on the rest of a step."""

    linear: Callable[[Tensor, Tensor, Tensor | None], Tensor]
    """`hidden` [T, K], weight [N, K], bias [N]."""
    silu_mul: Callable[[Tensor], Tensor]
    gelu_mul: Callable[[Tensor], Tensor]
    prepare_attention: Callable[[Tensor, Tensor, Tensor], Attention]


def gelu_mul(gate_up: Tensor) -> Tensor:
    """GeGLU's middle (arXiv 2002.05202) with the tanh form of GELU; shapes as in `silu_mul`."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (functional.gelu(gate, approximate="tanh") * up).to(gate_up.dtype)


FAST = Ops(functional.linear, silu_mul, gelu_mul, prepare_attention)
_EXACT = Ops(exact.linear, exact.silu_mul, exact.gelu_mul, exact.ExactAttention)


def check_exact_place(dtype: torch.dtype, device: torch.device) -> None:
    """ConfigError where exactness is not to be had."""
    if device.type != "cpu" or dtype != torch.float32:
        raise ConfigError(f"exact needs a CPU and float32, not {device} and {dtype}")


def exact_ops(weights: DecoderWeights) -> Ops:
    """The exact ops, tried on the shapes of these weights; ConfigError if this machine cannot keep them."""
    check_exact_products(_matrices(weights))
    return _EXACT


def check_exact_products(matrices: Iterable[Tensor]) -> None:
    """ConfigError if this machine's products with one of them depend on the batch."""
    shape = exact.check_products(matrices)
    if shape is not None:
        raise ConfigError(
            f"exact: on this machine products with a matrix of {shape[0]} x {shape[1]} depend on the batch"
        )


def _matrices(weights: DecoderWeights) -> Iterator[Tensor]:
    for layer in weights.layers:
        yield from (layer.qkv, layer.output, layer.gate_up, layer.down)
    yield weights.head
