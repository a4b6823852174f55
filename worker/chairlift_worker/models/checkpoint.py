"""A model folder as people save it: safetensors shards, and the small json files beside them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from chairlift_client.errors import ModelError

_INDEX = "model.safetensors.index.json"
_UNSAFE_SUFFIXES = frozenset({".bin", ".pt", ".pth", ".ckpt", ".pkl"})


class Weights:
    """The tensors of a folder by name, read from disk one at a time as they are taken.

    Close it by leaving its `with` block. Each tensor is taken once; what is left over at the end
    shows that the model is not of the shape its config claims.
    """

    def __init__(self, folder: Path) -> None:
        shards: list[Any] = [safe_open(path, framework="pt") for path in weight_files(folder)]
        self._shard_of = {name: shard for shard in shards for name in shard.keys()}  # noqa: SIM118

    def __enter__(self) -> Weights:
        return self

    def __exit__(self, *_: object) -> None:
        self._shard_of.clear()  # the last reference to each shard closes it

    def __contains__(self, name: str) -> bool:
        return name in self._shard_of

    @property
    def untaken(self) -> list[str]:
        """Names that nobody has asked for, sorted."""
        return sorted(self._shard_of)

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """The tensor `name`, converted; ModelError if it is missing or of another shape."""
        shard = self._shard_of.pop(name, None)
        if shard is None:
            raise ModelError(f"the weights have no tensor {name!r}")
        tensor: Tensor = shard.get_tensor(name)
        if tuple(tensor.shape) != shape:
            raise ModelError(f"tensor {name!r} has shape {tuple(tensor.shape)}, the config asks for {shape}")
        return tensor.to(device=device, dtype=dtype)


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a folder, in the order of their names.

    ModelError if there are none (a pickle can run code when it is loaded, so those are refused), if
    one that the index names is missing, or if one is cut short.
    """
    index = folder / _INDEX
    if index.is_file():
        names = sorted(set(read_json(index).get("weight_map", {}).values()))
        missing = [name for name in names if not (folder / name).is_file()]
        if missing:
            raise ModelError(f"{folder}: the index names {len(names)} files, {', '.join(missing)} missing")
        paths = [folder / name for name in names]
    else:
        paths = sorted(folder.glob("*.safetensors"))
    if not paths:
        raise ModelError(_why_no_weights(folder))
    for path in paths:
        _check_readable(path)
    return paths


def _why_no_weights(folder: Path) -> str:
    unsafe = sorted(path.name for path in folder.iterdir() if path.suffix in _UNSAFE_SUFFIXES)
    if not unsafe:
        return f"{folder}: no .safetensors files"
    return (
        f"{folder}: only pickled weights ({', '.join(unsafe)}), which can run code when they are loaded; "
        "convert them to safetensors first"
    )


def _check_readable(path: Path) -> None:
    try:
        with safe_open(path, framework="pt"):
            pass
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{path}: not a whole safetensors file: {error}") from error


def eos_token_ids(folder: Path) -> frozenset[int]:
    """Ids that end an output: those of generation config, config and tokenizer together."""
    generation, config, tokenizer = (
        read_json(folder / name)
        for name in ("generation_config.json", "config.json", "tokenizer_config.json")
    )
    text_config = config.get("text_config") or {}
    ids = {
        *_as_ids(generation.get("eos_token_id")),
        *_as_ids(config.get("eos_token_id")),
        *_as_ids(text_config.get("eos_token_id")),
    }
    token = tokenizer.get("eos_token")
    text = token.get("content") if isinstance(token, Mapping) else token
    for added in read_json(folder / "tokenizer.json").get("added_tokens", ()):
        if added["content"] == text:
            ids.add(added["id"])
    return frozenset(ids)


def _as_ids(value: int | list[int] | None) -> list[int]:
    if value is None:
        return []
    return value if isinstance(value, list) else [value]


def read_json(path: Path) -> dict[str, Any]:
    """The object in a json file, empty if there is no such file; ModelError if it is no object."""
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_bytes())
    except ValueError as error:
        raise ModelError(f"{path}: not valid json: {error}") from error
    if not isinstance(content, dict):
        raise ModelError(f"{path}: not a json object")
    return content
