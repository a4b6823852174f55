"""From the name of a model to something that runs."""

from __future__ import annotations

import logging
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from chairlift_client.errors import ConfigError, ModelError
from chairlift_client.protocol import ModelInfo
from chairlift_worker.engine.adapter import Adapter
from chairlift_worker.engine.batch import Chunk
from chairlift_worker.engine.runner import Runner, RunnerSpec
from chairlift_worker.models.architectures import (
    architecture_name,
    check_architecture,
    context_tokens,
    read_config,
)
from chairlift_worker.models.decoder import DecoderRunner
from chairlift_worker.models.decoder_shape import decoder_shape
from chairlift_worker.models.fallback import FallbackRunner
from chairlift_worker.models.fingerprint import fingerprint
from chairlift_worker.models.memory import check_fits
from chairlift_worker.models.source import Progress, default_cache, resolve
from chairlift_worker.models.tokenizer import ChatTokenizer

log = logging.getLogger(__name__)

_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
_USUAL_TOKENS = 1024


class AdapterLoader(Protocol):
    """See `DecoderRunner.load_adapter`."""

    def __call__(self, folder: Path, *, max_rank: int) -> Adapter:
        """Raises ModelError."""
        ...


@dataclass(frozen=True)
class LoadedModel:
    """A model ready to run, and what others have to know of it."""

    runner: Runner
    tokenizer: ChatTokenizer
    fingerprint: str
    architecture: str
    dtype: torch.dtype
    device: torch.device
    folder: Path
    load_adapter: AdapterLoader | None = None
    """Reads a LoRA adapter from its folder; None where the model takes none."""

    @property
    def info(self) -> ModelInfo:
        """What a worker announces; the number of partitions is not the model's to know."""
        spec = self.runner.spec
        return ModelInfo(
            fingerprint=self.fingerprint,
            context_tokens=spec.context_tokens,
            pool_tokens=spec.pool_tokens,
        )


def load_model(
    source: str,
    *,
    cache: Path | None = None,
    block_size: int = 16,
    kv_tokens: int = 0,
    num_sequences: int = 32,
    max_context_tokens: int = 0,
    dtype: str = "auto",
    device: str = "auto",
    exact: bool = False,
    adapters: bool = False,
    progress: Progress | None = None,
) -> LoadedModel:
    """Load what `source` names (see `source.resolve`) with a KV pool of `kv_tokens` slots.

    `kv_tokens` 0 makes room for `num_sequences` of 1024 tokens, and at least for one whole context.
    `max_context_tokens` 0 means as many as the model was made for; more than that is a ConfigError.
    `dtype` "auto" is float32 on a CPU, else what the weights were stored in; `device` "auto" is a GPU if
    there is one. `cache` is where GGUF files are converted to. `exact` makes logits independent of the batch
    to the last bit (see `DecoderRunner.load`); ConfigError where that cannot be had, and where `adapters` are
    wanted and cannot be had.

    The families that the lean decoder knows run on it, all others on transformers. ModelError for whatever
    cannot be had, cannot run, or does not fit the memory.
    """
    folder = resolve(source, cache=cache or default_cache(), progress=progress)
    config = read_config(folder)
    check_architecture(config)
    place = _device(device)
    number = _dtype(dtype, config, place)
    limit = _context_limit(config, max_context_tokens)
    num_blocks = -(-(kv_tokens or max(num_sequences * _USUAL_TOKENS, limit)) // block_size)
    check_fits(folder, config, kv_tokens=num_blocks * block_size, dtype=number, device=place)
    unlimited = _load_runner(
        folder,
        config,
        num_blocks=num_blocks,
        block_size=block_size,
        dtype=number,
        device=place,
        exact=exact,
        adapters=adapters,
    )
    runner = _limited(unlimited, limit)
    return LoadedModel(
        runner=runner,
        tokenizer=ChatTokenizer.load(folder, vocab_size=runner.spec.vocab_size),
        fingerprint=fingerprint(
            folder, dtype=number, context_tokens=runner.spec.longest_sequence, exact=exact
        ),
        architecture=architecture_name(config),
        dtype=number,
        device=place,
        folder=folder,
        load_adapter=unlimited.load_adapter if isinstance(unlimited, DecoderRunner) else None,
    )


def _limited(runner: Runner, limit: int) -> Runner:
    return runner if limit == runner.spec.context_tokens else _ShortContext(runner, limit)


class _ShortContext:
    """A runner that is told to take shorter sequences than it could."""

    def __init__(self, runner: Runner, context_tokens: int) -> None:
        self._runner = runner
        self._spec = runner.spec._replace(context_tokens=context_tokens)

    @property
    def spec(self) -> RunnerSpec:
        return self._spec

    def forward(self, chunks: Seq[Chunk]) -> Tensor:
        return self._runner.forward(chunks)


def _load_runner(
    folder: Path,
    config: PreTrainedConfig,
    *,
    num_blocks: int,
    block_size: int,
    dtype: torch.dtype,
    device: torch.device,
    exact: bool,
    adapters: bool,
) -> Runner:
    reason = _why_not_decoder(config)
    if reason is None:
        return DecoderRunner.load(
            folder, num_blocks=num_blocks, block_size=block_size, dtype=dtype, device=device, exact=exact
        )
    for setting, is_wanted in (("exact", exact), ("adapters", adapters)):
        if is_wanted:
            raise ConfigError(f"{setting} needs the decoder: {reason}")
    log.info("through transformers: %s", reason)
    return FallbackRunner.load(
        folder, num_blocks=num_blocks, block_size=block_size, dtype=dtype, device=device
    )


def _why_not_decoder(config: PreTrainedConfig) -> str | None:
    try:
        decoder_shape(config)
    except ModelError as reason:
        return str(reason)
    return None


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(1, device=device)  # it may be one that torch knows and this machine has not
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise ConfigError(f"device is {name!r}: {error}") from error
    return device


def _dtype(name: str, config: PreTrainedConfig, device: torch.device) -> torch.dtype:
    if name == "auto":
        stored: torch.dtype | None = config.get_text_config(decoder=True).dtype
        return torch.float32 if device.type == "cpu" or stored is None else stored
    if name not in _DTYPES:
        raise ConfigError(f"dtype is {name!r}; known: auto, {', '.join(_DTYPES)}")
    return _DTYPES[name]


def _context_limit(config: PreTrainedConfig, asked: int) -> int:
    possible = context_tokens(config)
    if asked > possible:
        raise ConfigError(f"context_tokens is {asked}; the model was made for {possible}")
    return asked or possible
