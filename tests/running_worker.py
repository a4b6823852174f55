"""A worker with the tiny model inside the test's own process and loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import cache
from typing import Any

import torch

from chairlift_client.connection import Shards
from chairlift_worker.bootstrap import draw_worker_id, make_engine, make_shelf
from chairlift_worker.config import WorkerConfig
from chairlift_worker.engine.engine import Engine
from chairlift_worker.engine.runner import Runner
from chairlift_worker.models.loading import LoadedModel, load_model
from chairlift_worker.models.source import default_cache
from chairlift_worker.service import Worker
from tiny_model import TINY_MODEL


@cache
def tiny(kv_tokens: int = 8192, exact: bool = False) -> LoadedModel:
    """The tiny model, loaded once. Only one worker at a time may use it: the KV pool is the runner's."""
    torch.set_num_threads(1)
    return load_model(str(TINY_MODEL), cache=default_cache(), kv_tokens=kv_tokens, device="cpu", exact=exact)


@asynccontextmanager
async def running_worker(
    url: str,
    namespace: str,
    *,
    kv_tokens: int = 8192,
    wrap: Callable[[Runner], Runner] = lambda runner: runner,
    teach: Callable[[Engine], Engine] = lambda engine: engine,
    **fields: Any,
) -> AsyncIterator[Worker]:
    """Runs until the block ends, then stops and hands back. `wrap` may put something before the
    runner,
    `teach` change what the engine expects.
    """
    config = WorkerConfig(
        model=str(TINY_MODEL), name="tiny", redis_url=url, namespace=namespace, **{"lease_s": 2.0, **fields}
    )
    model = tiny(kv_tokens, config.exact)
    model = replace(model, runner=wrap(model.runner))
    async with await Shards.open(url) as shards:
        worker = Worker(
            config,
            model,
            teach(make_engine(config, model)),
            shards,
            draw_worker_id(config),
            adapters=make_shelf(config, model),
        )
        running = asyncio.create_task(worker.run())
        try:
            yield worker
        finally:
            worker.stop_now()
            await running
