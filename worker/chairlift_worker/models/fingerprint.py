"""One short name for everything that decides a job's tokens.

Workers that share a queue resume each other's jobs in the middle of a text, which is only right if
they would all have written the same. So a worker whose fingerprint differs does not start there.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

import torch

from chairlift_worker.models.checkpoint import weight_files

_VERSION = "1"
_SAMPLES = 64
_SAMPLE_BYTES = 1 << 16
_SMALL_SUFFIXES = frozenset({".json", ".jinja", ".model", ".txt"})
"""Of the files beside the weights that say how model and tokenizer work."""


def fingerprint(folder: Path, *, dtype: torch.dtype, context_tokens: int, exact: bool = False) -> str:
    """32 hex digits over weights, config, tokenizer, template, dtype, limits and exactness.

    Small files count whole; a weights file by its name, size, header and 64 samples of 64 KiB spread
    evenly over it, so that hundreds of GB need no minutes, while other training shows everywhere.
    """
    digest = hashlib.blake2b(digest_size=16)
    settings = [_VERSION, str(dtype), str(context_tokens), *(["exact"] if exact else [])]
    for part in (*map(str.encode, settings), *_contents(folder)):
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.hexdigest()


def _contents(folder: Path) -> Iterator[bytes]:
    for path in weight_files(folder):
        yield path.name.encode()
        yield path.stat().st_size.to_bytes(8, "little")
        yield from _samples(path)
    for path in sorted(folder.iterdir()):
        if path.suffix in _SMALL_SUFFIXES and path.is_file():
            yield path.name.encode()
            yield path.read_bytes()


def _samples(path: Path) -> Iterator[bytes]:
    """The header of a safetensors file (its length stands in the first 8 bytes), then the samples."""
    size = path.stat().st_size
    with path.open("rb") as file:
        prefix = file.read(8)
        yield prefix + file.read(int.from_bytes(prefix, "little"))
        last = max(0, size - _SAMPLE_BYTES)
        for index in range(_SAMPLES):
            file.seek(last * index // (_SAMPLES - 1))
            yield file.read(_SAMPLE_BYTES)
