"""Writing one safetensors file tensor by tensor, so that a model never has to fit in memory twice.

Format: https://github.com/huggingface/safetensors#format (8-byte header length, JSON header, data).
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

FloatType = Literal["float32", "float16"]

_TAGS: dict[FloatType, str] = {"float32": "F32", "float16": "F16"}
_HEADER_ALIGNMENT = 8


def write_safetensors(
    path: Path,
    shapes: Mapping[str, tuple[int, ...]],
    tensors: Iterable[tuple[str, NDArray[np.float32]]],
    dtype: FloatType,
) -> None:
    """Write `tensors`, which come in the order of `shapes`, as `dtype`."""
    expected = iter(shapes.items())
    with path.open("wb") as file:
        file.write(_header(shapes, dtype))
        for name, values in tensors:
            assert (name, values.shape) == next(expected), f"{name} {values.shape} is out of order"
            np.ascontiguousarray(values, dtype=dtype).tofile(file)
    assert next(expected, None) is None, "fewer tensors than shapes"


def _header(shapes: Mapping[str, tuple[int, ...]], dtype: FloatType) -> bytes:
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in shapes.items():
        start, end = end, end + math.prod(shape) * np.dtype(dtype).itemsize
        entries[name] = {"dtype": _TAGS[dtype], "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % _HEADER_ALIGNMENT)
    return struct.pack("<Q", len(text)) + text
