"""How a worker makes itself known: its model to clients, its limits to shards, its health to operators."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
from collections.abc import Callable, Sequence
from importlib.metadata import version

from redis.exceptions import RedisError

from chairlift_client import calls, keys
from chairlift_client.connection import Shards
from chairlift_client.errors import ModelError, ServerUnavailable, ServerUnsupported
from chairlift_client.worker_operations import Announcement, announce, open_partition
from chairlift_worker.config import WorkerConfig
from chairlift_worker.engine.request import StepStats
from chairlift_worker.engine.runner import RunnerSpec
from chairlift_worker.models.adapter_shelf import AdapterShelf
from chairlift_worker.queue.attempts import Board

log = logging.getLogger(__name__)

BEATS_PER_TTL = 3
MAX_NAMES_CHARS = 4096


class Heartbeat:
    """Announces the worker again and again; three missed beats, and it counts as gone."""

    def __init__(
        self,
        config: WorkerConfig,
        spec: RunnerSpec,
        fingerprint: str,
        shards: Shards,
        worker_id: str,
        board: Board,
        num_used_blocks: Callable[[], int],
        adapters: AdapterShelf | None = None,
    ) -> None:
        self._config = config
        self._spec = spec
        self._fingerprint = fingerprint
        self._shards = shards
        self._worker_id = worker_id
        self._board = board
        self._num_used_blocks = num_used_blocks
        self._adapters = adapters
        self._started_at = time.time()
        self.last_step: StepStats | None = None
        self.num_tokens = 0
        self.prefixes: Sequence[str] = ()
        """The partitions that submit is told of."""
        self.on_growth: Callable[[int], None] = lambda partitions: None
        """Called when the model has more partitions than these."""

    async def announce(self) -> int:
        """One beat; how many partitions the model has. ModelError if another fingerprint is alive."""
        shared = keys.shared(self._config.namespace)
        adapters = {} if self._adapters is None else await asyncio.to_thread(_adapter_fields, self._adapters)
        call = announce(
            shared,
            self._worker_id,
            BEATS_PER_TTL * self._config.lease_ms,
            self._config.model_name,
            self._fingerprint,
            partitions=self._config.partitions,
            context_tokens=self._spec.context_tokens,
            pool_tokens=self._spec.pool_tokens,
            adapters=self._adapters is not None,
            heartbeat=self._fields() | adapters,
        )
        answer: Announcement = await self._shards.call(shared, lambda shard: calls.run(shard.redis, call))
        if answer.fingerprint is not None:
            raise ModelError(
                f"model name {self._config.model_name!r} is served with fingerprint {answer.fingerprint} by "
                f"live workers, this one has {self._fingerprint}: stop those, or give this one another --name"
            )
        return answer.partitions

    async def run(self) -> None:
        """Beat for ever."""
        while True:
            await asyncio.sleep(self._config.lease_s)
            try:
                async with asyncio.timeout(BEATS_PER_TTL * self._config.lease_s):
                    partitions = await self.announce()
                    await self.open_partitions()
                if partitions > len(self.prefixes):
                    self.on_growth(partitions)
            except (RedisError, ServerUnavailable, ServerUnsupported, ModelError, TimeoutError) as error:
                log.warning("heartbeat: %s: %s", type(error).__name__, error)

    async def open_partitions(self) -> None:
        """Tell every partition what submit has to check; again and again, since somebody may delete it."""
        config, spec = self._config, self._spec
        for prefix in self.prefixes:
            call = open_partition(
                prefix,
                context_tokens=spec.context_tokens,
                pool_tokens=spec.pool_tokens,
                max_waiting=config.max_waiting,
                max_bytes=config.max_queue_bytes,
                max_tenant_jobs=config.max_tenant_jobs,
            )
            await self._shards.run(call)

    def _fields(self) -> dict[str, str | int | float]:
        step = self.last_step
        return {
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "version": version("chairlift"),
            "started_ms": round(self._started_at * 1000),
            "state": "draining" if self._board.closed else "ready",
            "on_board": len(self._board),
            "max_num_seqs": self._config.max_num_seqs,
            "num_blocks": self._spec.num_blocks,
            "used_blocks": self._num_used_blocks(),
            "cached_blocks": step.num_cached_blocks if step else 0,
            "cache_hits": round(step.hit_rate, 4) if step else 0.0,
            "steps": step.step if step else 0,
            "tokens": self.num_tokens,
        }


def _adapter_fields(adapters: AdapterShelf) -> dict[str, str | int | float]:
    """Looks into a folder, which may take a while."""
    names = adapters.names
    return {
        "adapters": len(names),
        "adapters_held": adapters.num_held,
        "adapter_names": ",".join(names)[:MAX_NAMES_CHARS],
    }
