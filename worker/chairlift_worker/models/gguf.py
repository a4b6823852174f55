"""A GGUF file, converted once into a folder that transformers and our decoder load as any other.

Weights are dequantized: what is saved is loading code for every quantized format, at the price of disk
(SmolLM2-135M: 98 MB → 538 MB). Up to 10^9 weights they are kept as float32, which loses nothing; beyond
that as float16, half the disk, which every quantization of 8 bits or less survives to its last bit but
for the rounding of scales.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from chairlift_client.errors import ModelError
from chairlift_worker.models import gguf_config, gguf_tokenizer
from chairlift_worker.models.gguf_file import GgufFile
from chairlift_worker.models.safetensors_writer import FloatType, write_safetensors
from chairlift_worker.models.source import Progress

CONVERTER_VERSION = 1
"""Part of the folder's name: raised whenever the same file would be converted differently."""
FLOAT32_WEIGHTS_LIMIT = 1_000_000_000
_ABANDONED_AFTER_S = 3600.0
_PARTIAL_PREFIX = ".converting-"


def convert_gguf(path: Path, cache: Path, progress: Progress | None = None) -> Path:
    """A folder under `cache` with the model of the GGUF file `path`, made if it is not there yet.

    The folder is named after the file's content and appears at once, whole: whoever dies in between,
    or converts the same file at the same time, leaves no half of it. It holds config.json,
    generation_config.json, model.safetensors, tokenizer.json and tokenizer_config.json.

    Raises ModelError: not a GGUF file, an architecture, tensor or tokenizer that is not supported,
    or too little room on the disk.
    """
    report = progress or (lambda _part, _what: None)
    report(0.0, "reading")
    file = GgufFile(path)
    folder = cache / f"{path.stem}-{_digest(path)[:16]}-v{CONVERTER_VERSION}"
    if folder.is_dir():
        report(1.0, "already converted")
        return folder
    cache.mkdir(parents=True, exist_ok=True)
    _remove_abandoned(cache)
    partial = Path(tempfile.mkdtemp(prefix=_PARTIAL_PREFIX, dir=cache))
    partial.chmod(0o755)  # like any other folder: a cache may be shared
    try:
        _write_folder(file, partial, report)
        _publish(partial, folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    report(1.0, "converted")
    return folder


def _write_folder(file: GgufFile, folder: Path, report: Progress) -> None:
    dtype: FloatType = "float32" if gguf_config.num_weights(file) <= FLOAT32_WEIGHTS_LIMIT else "float16"
    config = gguf_config.config_of(file) | {"dtype": dtype} | _token_ids(file)
    ends = gguf_tokenizer.end_token_ids(file)
    report(0.05, "tokenizer")
    gguf_tokenizer.tokenizer_of(file).save(str(folder / "tokenizer.json"))
    _write_json(folder / "tokenizer_config.json", gguf_tokenizer.tokenizer_config_of(file))
    _write_json(folder / "config.json", config)
    _write_json(folder / "generation_config.json", _token_ids(file) | {"eos_token_id": ends})
    _write_weights(file, folder / "model.safetensors", dtype, report)


def _write_weights(file: GgufFile, path: Path, dtype: FloatType, report: Progress) -> None:
    names = gguf_config.weight_names(file)
    _require_room(path.parent, gguf_config.num_weights(file) * np.dtype(dtype).itemsize)
    shapes = {names[name]: file.tensors[name].shape for name in names}
    write_safetensors(path, shapes, _converted(file, names, report), dtype)


def _converted(
    file: GgufFile, names: dict[str, str], report: Progress
) -> Iterator[tuple[str, NDArray[np.float32]]]:
    architecture = gguf_config.architecture_of(file)
    for position, (name, converted_name) in enumerate(names.items()):
        report(0.1 + 0.9 * position / len(names), "weights")
        values = file.read(file.tensors[name])
        transform = architecture.transform(file, name)
        yield converted_name, values if transform is None else transform(values)


def _token_ids(file: GgufFile) -> dict[str, object]:
    keys = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}
    present = {name: f"tokenizer.ggml.{key}_token_id" for name, key in keys.items()}
    return {name: file.integer(key) for name, key in present.items() if file.has(key)}


def _require_room(folder: Path, num_bytes: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < num_bytes:
        raise ModelError(f"the converted model takes {num_bytes} bytes, {folder} has {free} free")


def _publish(partial: Path, folder: Path) -> None:
    try:
        os.rename(partial, folder)
    except OSError:
        # Somebody else converted the same file meanwhile: theirs is as good.
        if not folder.is_dir():
            raise


def _remove_abandoned(cache: Path) -> None:
    """Removes what a killed conversion left, once nobody can be still at it."""
    for partial in cache.glob(f"{_PARTIAL_PREFIX}*"):
        if time.time() - partial.stat().st_mtime > _ABANDONED_AFTER_S:
            shutil.rmtree(partial, ignore_errors=True)


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
