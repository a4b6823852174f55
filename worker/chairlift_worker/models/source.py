"""Where a model comes from: a folder, a GGUF file, or a repository on the Hugging Face hub."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError

from chairlift_client.errors import ModelError

Progress = Callable[[float, str], None]
"""Told the part that is done, 0 to 1, and what is going on."""

_HUB_ID = re.compile(r"(?:[\w.-]+/)?[\w.-]+(?:@[\w./-]+)?", re.ASCII)
_HUB_FILES = (
    "*.safetensors",
    "*.safetensors.index.json",
    "config.json",
    "generation_config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "*.model",
)
"""Data only: nothing in here is ever run."""


def resolve(source: str, *, cache: Path, progress: Progress | None = None) -> Path:
    """The folder with the model that `source` names, fetched or converted if need be.

    `source` is a folder, a `.gguf` file (converted once, into `cache`), or a hub id `owner/name`, with
    `@revision` to pin one. Raises ModelError if there is no such thing, or it cannot be had.
    """
    path = Path(source).expanduser()
    if path.is_dir():
        return path
    if path.suffix == ".gguf":
        return _convert(path, cache, progress)
    if path.exists():
        raise ModelError(f"{source}: neither a folder nor a .gguf file")
    if source.startswith((".", "/", "~")) or not _HUB_ID.fullmatch(source):
        raise ModelError(f"{source}: no such folder, and not a hub id like owner/name")
    return _download(source)


def default_cache() -> Path:
    """Where converted models are kept if nobody says otherwise."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "chairlift" / "models"


def _convert(path: Path, cache: Path, progress: Progress | None) -> Path:
    from chairlift_worker.models.gguf import convert_gguf  # a heavy part that few need

    if not path.is_file():
        raise ModelError(f"{path}: no such file")
    return convert_gguf(path, cache, progress)


def _download(source: str) -> Path:
    """From the hub, or the hub's own cache on this machine."""
    repository, _, revision = source.partition("@")
    try:
        folder = snapshot_download(repository, revision=revision or None, allow_patterns=list(_HUB_FILES))
    except (HfHubHTTPError, HFValidationError, OSError, ValueError) as error:
        raise ModelError(f"{source}: no such folder, and not to be had from the hub: {error}") from error
    return Path(folder)
