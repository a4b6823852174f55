"""The tensors of a LoRA adapter, laid out as the decoder lays out its own: few and large products.

A fused product of the base has one pair here, whatever modules are in it:

    shrink  A of query          expand  B of query  0          0
            A of key                    0           B of key   0
            A of value                  0           0          B of value
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec
import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from chairlift_client.errors import ModelError
from chairlift_worker.models.decoder_shape import DecoderShape
from chairlift_worker.models.decoder_weights import Projection, projections
from chairlift_worker.models.lora_config import LoraConfig, read_lora_config

WEIGHTS_FILE = "adapter_model.safetensors"
_PREFIX = "base_model.model."
_RANK_STEP = 8
"""Ranks are filled up with zeros to multiples of this: whole vectors, and never a product with a vector,
which libraries add up in another way."""
_SLACK_BYTES = 1 << 20
"""Of a weights file, beside its numbers."""
_MAX_ITEM_BYTES = 4


ProductName = Literal["qkv", "output", "gate_up", "down"]


class LowRank(NamedTuple):
    """The pair of one product of the base [N, K]: it adds expand · shrink, of which the scale is a part."""

    shrink: Tensor  # [R, K]
    expand: Tensor  # [N, R]


class LoraLayer(NamedTuple):
    """The pairs of one layer; None where the adapter leaves the product alone."""

    qkv: LowRank | None
    output: LowRank | None
    gate_up: LowRank | None
    down: LowRank | None


@dataclass(frozen=True, eq=False)
class LoraWeights:
    """An adapter ready to run; an `engine.adapter.Adapter`."""

    digest: str
    """Hash over the stored tensors and what scales them."""
    layers: tuple[LoraLayer, ...]

    def matrices(self) -> Iterator[Tensor]:
        """Every matrix that rows are multiplied with."""
        for layer in self.layers:
            for pair in layer:
                if pair is not None:
                    yield from pair


def load_lora(
    folder: Path, shape: DecoderShape, dtype: torch.dtype, device: torch.device, *, max_rank: int
) -> LoraWeights:
    """Read an adapter as PEFT saves it, for a base model of this shape.

    ModelError, with the names and numbers, for what is not supported, and for tensors that are missing, left
    over or of another shape than base model and config say.
    """
    config = read_lora_config(folder)
    _check_rank(config, max_rank)
    stored = _read(folder, most_bytes=_most_bytes(shape, max_rank))
    reader = _Reader(stored.tensors, config, dtype, device)
    products = projections(shape)
    layers = tuple(
        LoraLayer(*(reader.pair(index, product) for product in products))
        for index in range(len(shape.layers))
    )
    reader.check_all_taken()
    digest = hashlib.blake2b(stored.digest, digest_size=16)
    digest.update(msgspec.json.encode(config, order="sorted"))
    return LoraWeights(digest.hexdigest(), layers)


class _Stored(NamedTuple):
    tensors: dict[str, Tensor]
    digest: bytes


def _read(folder: Path, *, most_bytes: int) -> _Stored:
    """The file is read once, so that the hash is that of the very tensors."""
    path = folder / WEIGHTS_FILE
    if not path.is_file():
        pickled = " but a pickled one, which could run code" if path.with_suffix(".bin").exists() else ""
        raise ModelError(f"it has no {WEIGHTS_FILE}{pickled}")
    size = path.stat().st_size
    if size > most_bytes:
        raise ModelError(f"{WEIGHTS_FILE} has {size} bytes; within max_adapter_rank it needs {most_bytes}")
    content = path.read_bytes()
    try:
        tensors = safetensors.torch.load(content)
    except SafetensorError as error:
        raise ModelError(f"{WEIGHTS_FILE} is not a whole safetensors file: {error}") from error
    return _Stored(tensors, hashlib.blake2b(content).digest())


class _Reader:
    """Takes the two tensors of each module, each once."""

    def __init__(
        self, tensors: dict[str, Tensor], config: LoraConfig, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._left = tensors
        self._num_stored = len(tensors)
        self._config, self._dtype, self._device = config, dtype, device

    def pair(self, layer: int, product: Projection) -> LowRank | None:
        """Of the modules of one product, those that are there."""
        shrinks: list[Tensor] = []
        expands: list[Tensor] = []
        first_row = 0
        for name, rows in zip(product.modules, product.rows, strict=True):
            module = f"model.layers.{layer}.{name}"
            if self._has(module, layer):
                rank = self._config.rank_of(module)
                shrinks.append(self._take(f"{module}.lora_A", (rank, product.columns)))
                expand = torch.zeros(sum(product.rows), rank)
                stored = self._take(f"{module}.lora_B", (rows, rank))
                expand[first_row : first_row + rows] = stored * self._config.scale_of(module)
                expands.append(expand)
            first_row += rows
        if not shrinks:
            return None
        missing = -sum(map(len, shrinks)) % _RANK_STEP
        shrinks.append(torch.zeros(missing, product.columns))
        expands.append(torch.zeros(sum(product.rows), missing))
        return LowRank(self._placed(torch.cat(shrinks)), self._placed(torch.cat(expands, dim=1)))

    def check_all_taken(self) -> None:
        """What nobody took would be missing from every answer."""
        if self._left:
            name = min(self._left)
            raise ModelError(
                f"{len(self._left)} of {self._num_stored} tensors belong to nothing that can be adapted "
                f"here (the projections of attention and feed-forward): {name}"
            )
        if not self._num_stored:
            raise ModelError(f"{WEIGHTS_FILE} has no tensors")

    def _has(self, module: str, layer: int) -> bool:
        names = (f"{_PREFIX}{module}.lora_{letter}.weight" for letter in "AB")
        return any(name in self._left for name in names) or self._config.asks_for(module, layer)

    def _take(self, name: str, shape: tuple[int, int]) -> Tensor:
        """In float32."""
        full_name = f"{_PREFIX}{name}.weight"
        tensor = self._left.pop(full_name, None)
        if tensor is None:
            raise ModelError(f"tensor {full_name} is missing")
        if tuple(tensor.shape) != shape:
            raise ModelError(
                f"tensor {full_name} has shape {tuple(tensor.shape)}; base model and config ask for {shape}"
            )
        if not torch.isfinite(tensor).all():
            raise ModelError(f"tensor {full_name} has numbers that are not finite")
        return tensor.float()

    def _placed(self, matrix: Tensor) -> Tensor:
        return matrix.to(device=self._device, dtype=self._dtype)


def _check_rank(config: LoraConfig, max_rank: int) -> None:
    rank = max(config.r, *config.rank_pattern.values(), 0)
    if rank > max_rank:
        raise ModelError(f"its rank is {rank}; this worker takes at most {max_rank} (max_adapter_rank)")


def _most_bytes(shape: DecoderShape, max_rank: int) -> int:
    """Of a file with every module at the highest rank."""
    numbers = sum(sum(p.rows) + p.columns * len(p.rows) for p in projections(shape))
    return len(shape.layers) * numbers * max_rank * _MAX_ITEM_BYTES + _SLACK_BYTES
