"""From a config to a running worker."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import signal
import socket
import sys
from functools import partial
from pathlib import Path

import torch

from chairlift_client import keys
from chairlift_client.connection import Shards
from chairlift_client.errors import ConfigError
from chairlift_worker.config import WorkerConfig
from chairlift_worker.engine.engine import Engine
from chairlift_worker.engine.request import EngineConfig
from chairlift_worker.models.adapter_shelf import AdapterShelf
from chairlift_worker.models.loading import LoadedModel, load_model
from chairlift_worker.server_check import check_policy, check_server
from chairlift_worker.service import Worker

log = logging.getLogger(__name__)

SWITCH_INTERVAL_S = 0.0005
"""How long the engine may keep the event loop waiting for the interpreter: boarding waits with it."""


def run_worker(config: WorkerConfig) -> None:
    """Load the model and serve it. Raises one of our errors for what an operator can mend."""
    torch.set_num_threads(config.threads or default_threads())
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    asyncio.run(check_server(config.redis_url))  # now, and not after minutes of loading
    asyncio.run(serve(config, load(config)))


async def serve(config: WorkerConfig, model: LoadedModel) -> None:
    """Serve until SIGTERM (drain) or SIGINT (at once)."""
    async with await Shards.open(config.redis_url) as shards:
        await check_policy(shards)
        worker = Worker(
            config,
            model,
            make_engine(config, model),
            shards,
            draw_worker_id(config),
            adapters=make_shelf(config, model),
        )
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, worker.drain)
        loop.add_signal_handler(signal.SIGINT, worker.stop_now)
        await worker.run()


def load(config: WorkerConfig) -> LoadedModel:
    """The model, with a KV pool of the configured size."""
    return load_model(
        config.model,
        cache=Path(config.cache).expanduser() if config.cache else None,
        block_size=config.block_size,
        kv_tokens=config.kv_tokens,
        num_sequences=config.max_num_seqs,
        max_context_tokens=config.context_tokens,
        dtype=config.dtype,
        device=config.device,
        exact=config.exact,
        adapters=bool(config.adapters),
    )


def make_engine(config: WorkerConfig, model: LoadedModel) -> Engine:
    """The engine that goes with the config."""
    limits = EngineConfig(
        max_num_seqs=config.max_num_seqs,
        max_step_tokens=max(config.max_step_tokens, config.max_num_seqs),
        max_chunk_tokens=config.max_step_tokens,
        prefix_cache=config.prefix_cache,
        max_prefill_tokens=config.max_prefill_tokens,
        target_itl_s=config.target_itl_ms / 1000,
    )
    return Engine(model.runner, model.tokenizer, limits, fingerprint=model.fingerprint)


def make_shelf(config: WorkerConfig, model: LoadedModel) -> AdapterShelf | None:
    """The adapters that jobs may name. ConfigError where there is no such folder, or the model takes none."""
    if not config.adapters:
        return None
    if model.load_adapter is None:
        raise ConfigError(f"adapters needs the decoder; {model.architecture} runs on transformers")
    load = partial(model.load_adapter, max_rank=config.max_adapter_rank)
    return AdapterShelf(Path(config.adapters).expanduser(), load, max_held=config.max_adapters)


def draw_worker_id(config: WorkerConfig) -> str:
    """Readable, and never the same twice: it is the owner in the fence."""
    base = config.worker_id or f"{socket.gethostname()}-{os.getpid()}"
    return f"{re.sub('[^A-Za-z0-9_-]', '-', base)[:64]}-{keys.random_base62(8)}"


def default_threads() -> int:
    """One for each core but one, which is left to the event loop where there is more than one."""
    return max(1, _num_cores() - 1)


def _num_cores() -> int:
    """Those that this process may use, where the system can tell."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
