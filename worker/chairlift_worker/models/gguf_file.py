"""Reading a GGUF file: its metadata and its tensors, straight from a memory map.

The `gguf` package brings the quantization formats; the header is parsed here because that is
twenty times faster on vocabularies of 10^5 entries and lets a broken file be named as such.
Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md (versions 2 and 3, little endian).
"""

from __future__ import annotations

import math
import struct
from pathlib import Path
from typing import NamedTuple

import gguf
import numpy as np
from numpy.typing import NDArray

from chairlift_client.errors import ModelError

Scalar = bool | int | float | str
Value = Scalar | list[str] | NDArray[np.generic]

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_DEFAULT_ALIGNMENT = 32
_STRING, _ARRAY = 8, 9
_NUMBER_FORMATS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""GGUF value type → struct format, little endian."""


class TensorInfo(NamedTuple):
    """Where a tensor lies. `shape` is in row-major order, as torch and numpy have it."""

    name: str
    shape: tuple[int, ...]
    quantization: gguf.GGMLQuantizationType
    start: int
    """First byte in the file."""
    num_bytes: int


class GgufFile:
    """One GGUF file, its header parsed.

    Raises ModelError when the file is absent, not GGUF, of another version, or cut off.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._data: NDArray[np.uint8] = np.memmap(path, mode="r", dtype=np.uint8)
        except (OSError, ValueError) as error:
            raise ModelError(f"cannot read the GGUF file {path}: {error}") from error
        try:
            self._metadata, self.tensors = _parse(self._data.data)
        except (struct.error, UnicodeDecodeError) as error:
            raise ModelError(f"{path} is cut off or damaged inside its header ({error})") from error
        except ModelError as error:
            raise ModelError(f"{path}: {error}") from None
        for tensor in self.tensors.values():
            end = tensor.start + tensor.num_bytes
            if end > len(self._data):
                raise ModelError(
                    f"{path} is cut off: {tensor.name} ends at byte {end}, the file at {len(self._data)}"
                )

    @property
    def architecture(self) -> str:
        """What the file says it is, such as `llama`."""
        return self.text("general.architecture")

    def integer(self, key: str, default: int | None = None) -> int:
        """An integer entry; ModelError when absent without a default, or of another type."""
        value = self._required(key) if default is None else self._metadata.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int):
            raise self._wrong_type(key, "an integer", value)
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A float entry; ModelError when absent without a default, or of another type."""
        value = self._required(key) if default is None else self._metadata.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self._wrong_type(key, "a number", value)
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        """A boolean entry."""
        value = self._metadata.get(key, default)
        if not isinstance(value, bool):
            raise self._wrong_type(key, "a boolean", value)
        return value

    def text(self, key: str, default: str | None = None) -> str:
        """A string entry; ModelError when absent without a default, or of another type."""
        value = self._required(key) if default is None else self._metadata.get(key, default)
        if not isinstance(value, str):
            raise self._wrong_type(key, "a string", value)
        return value

    def texts(self, key: str) -> list[str]:
        """A list of strings."""
        value = self._required(key)
        if not isinstance(value, list):
            raise self._wrong_type(key, "a list of strings", value)
        return value

    def numbers(self, key: str) -> list[float]:
        """A list of numbers."""
        value = self._required(key)
        if not isinstance(value, np.ndarray):
            raise self._wrong_type(key, "a list of numbers", value)
        numbers: list[float] = value.tolist()
        return numbers

    def has(self, key: str) -> bool:
        """Whether the metadata holds this key."""
        return key in self._metadata

    def read(self, tensor: TensorInfo) -> NDArray[np.float32]:
        """The tensor's values, dequantized to float32, in its row-major shape.

        Raises ModelError for a quantization that cannot be undone here.
        """
        raw = self._data[tensor.start : tensor.start + tensor.num_bytes]
        rows = raw.reshape(*tensor.shape[:-1], -1)
        try:
            values = gguf.dequantize(rows, tensor.quantization)
        except NotImplementedError as error:
            raise ModelError(f"{tensor.name}: {error}") from error
        return np.asarray(values, dtype=np.float32).reshape(tensor.shape)

    def _required(self, key: str) -> Value:
        try:
            return self._metadata[key]
        except KeyError:
            raise ModelError(f"{self.path} lacks the GGUF entry {key!r}") from None

    def _wrong_type(self, key: str, wanted: str, value: object) -> ModelError:
        return ModelError(f"{self.path}: {key!r} should be {wanted}, is {type(value).__name__}")


class _Cursor:
    """Reads the header front to back."""

    def __init__(self, data: memoryview) -> None:
        self._data = data
        self.position = 0

    def number(self, layout: str) -> int | float | bool:
        value: int | float | bool = struct.unpack_from("<" + layout, self._data, self.position)[0]
        self.position += struct.calcsize("<" + layout)
        return value

    def integer(self, layout: str) -> int:
        return int(self.number(layout))

    def text(self) -> str:
        return self._bytes(self.integer("Q")).decode("utf-8")

    def value(self, kind: int) -> Value:
        if kind == _STRING:
            return self.text()
        if kind == _ARRAY:
            return self._array(self.integer("I"), self.integer("Q"))
        return self.number(_layout_of(kind))

    def _array(self, kind: int, count: int) -> Value:
        if kind == _STRING:
            return [self.text() for _ in range(count)]
        dtype = np.dtype("<" + _layout_of(kind))
        return np.frombuffer(self._bytes(count * dtype.itemsize), dtype=dtype)

    def _bytes(self, length: int) -> bytes:
        end = self.position + length
        if end > len(self._data):
            raise struct.error(f"{length} bytes wanted at {self.position} of {len(self._data)}")
        taken = bytes(self._data[self.position : end])
        self.position = end
        return taken


def _layout_of(kind: int) -> str:
    try:
        return _NUMBER_FORMATS[kind]
    except KeyError:
        raise ModelError(f"GGUF value type {kind} is not known") from None


def _parse(data: memoryview) -> tuple[dict[str, Value], dict[str, TensorInfo]]:
    if bytes(data[:4]) != _MAGIC:
        raise ModelError("not a GGUF file (it does not start with the bytes GGUF)")
    cursor = _Cursor(data)
    cursor.position = len(_MAGIC)
    version = cursor.integer("I")
    if version not in _VERSIONS:
        raise ModelError(f"GGUF version {version} (or byte order) is not supported, only {_VERSIONS}")
    num_tensors, num_entries = cursor.integer("Q"), cursor.integer("Q")
    metadata: dict[str, Value] = {}
    for _ in range(num_entries):
        key = cursor.text()
        metadata[key] = cursor.value(cursor.integer("I"))
    located = [_tensor_info(cursor) for _ in range(num_tensors)]
    alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or alignment < 1:
        raise ModelError(f"general.alignment is {alignment!r}, should be a positive integer")
    base = math.ceil(cursor.position / alignment) * alignment
    return metadata, {tensor.name: tensor._replace(start=base + tensor.start) for tensor in located}


def _tensor_info(cursor: _Cursor) -> TensorInfo:
    """One entry of the tensor table; `start` is still relative to the data section."""
    name = cursor.text()
    shape = tuple(cursor.integer("Q") for _ in range(cursor.integer("I")))[::-1]
    kind, start = cursor.integer("I"), cursor.integer("Q")
    try:
        quantization = gguf.GGMLQuantizationType(kind)
    except ValueError:
        raise ModelError(f"{name}: quantization type {kind} is not known") from None
    per_block, block_bytes = gguf.GGML_QUANT_SIZES[quantization]
    return TensorInfo(name, shape, quantization, start, math.prod(shape) // per_block * block_bytes)
