"""Leases: renewed by heartbeat in a task of their own, so that a long engine step cannot lose one; and the
reaper, which takes them away from workers that are gone."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence

from redis.exceptions import RedisError

from chairlift_client import calls
from chairlift_client.connection import Shards
from chairlift_client.errors import ServerUnavailable
from chairlift_client.worker_operations import ReapReply, RenewReply, RetryPolicy, reap, renew, tidy
from chairlift_worker.background import cancel_all
from chairlift_worker.queue.attempts import Attempt, Board

log = logging.getLogger(__name__)

TIDY_EVERY_S = 60.0
_TROUBLE = (RedisError, ServerUnavailable, TimeoutError)


class LeaseKeeper:
    """Renews the board's attempts every quarter of a lease, and reaps every third."""

    def __init__(
        self,
        shards: Shards,
        prefixes: Sequence[str],
        worker: str,
        *,
        lease_ms: int,
        policy: RetryPolicy,
        board: Board,
        on_lost: Callable[[Attempt], None],
        on_lapsed: Callable[[list[Attempt]], None],
        on_cancelled: Callable[[Attempt], None],
    ) -> None:
        self._shards = shards
        self._prefixes = prefixes
        self._worker = worker
        self._lease_ms = lease_ms
        self._policy = policy
        self._board = board
        self._on_lost = on_lost
        self._on_lapsed = on_lapsed
        self._on_cancelled = on_cancelled

    async def keep(self) -> None:
        """Renew, for ever. Work stops on what could not be renewed for a whole lease: it may be another's.

        A renewal does not wait for the answer to the one before: a server that is slow, but answers within
        half a lease, costs nothing. Two without an answer mean that connections may be half open, all of
        them: the third goes over a new one.
        """
        renewals: dict[str, list[asyncio.Task[None]]] = {prefix: [] for prefix in self._prefixes}
        try:
            while True:
                for prefix, running in renewals.items():
                    running.append(asyncio.create_task(self._renew(prefix, over_new=len(running) > 1)))
                await asyncio.sleep(self._lease_ms / 4000)
                for prefix, running in renewals.items():
                    renewals[prefix] = [task for task in running if not task.done() or task.result()]
                self._drop_lapsed()
        finally:
            await cancel_all([task for running in renewals.values() for task in running])

    async def sweep(self) -> None:
        """Reap, and now and then tidy, for ever."""
        tidied_at = time.monotonic()
        while True:
            await asyncio.sleep(self._lease_ms / 3000)
            is_tidying = time.monotonic() - tidied_at > TIDY_EVERY_S
            for prefix in self._prefixes:
                await self._reap(prefix, is_tidying)
            if is_tidying:
                tidied_at = time.monotonic()

    async def _renew(self, prefix: str, *, over_new: bool) -> None:
        attempts = self._board.by_prefix().get(prefix, [])
        sent_at = time.monotonic()
        call = renew(
            prefix,
            self._worker,
            self._lease_ms,
            [(attempt.job.job_id, attempt.job.epoch) for attempt in attempts],
        )
        try:
            async with asyncio.timeout(self._lease_ms / 1000):
                shard = self._shards.shard_of(prefix)
                if over_new:
                    await shard.drop_idle()
                reply: RenewReply = await calls.run(shard.redis, call)
        except _TROUBLE as error:
            log.warning("leases of %s not renewed: %s: %s", prefix, type(error).__name__, error)
            return
        for attempt in attempts:
            attempt.leased_at = max(attempt.leased_at, sent_at)
            if self._board.get(attempt.key) is None:
                continue  # it ended while the question was under way
            if attempt.job.job_id in reply.lost:
                log.warning("job %s: the lease is lost", attempt.job.job_id)
                self._on_lost(attempt)
            elif (attempt.job.job_id, attempt.job.epoch) in reply.cancelled:
                self._on_cancelled(attempt)

    def _drop_lapsed(self) -> None:
        oldest = time.monotonic() - self._lease_ms / 1000
        for prefix, attempts in self._board.by_prefix().items():
            lapsed = [attempt for attempt in attempts if attempt.leased_at < oldest]
            if lapsed:
                log.error(
                    "%d leases of %s lapsed: no renewal within %d ms", len(lapsed), prefix, self._lease_ms
                )
                self._on_lapsed(lapsed)

    async def _reap(self, prefix: str, is_tidying: bool) -> None:
        try:
            async with asyncio.timeout(self._lease_ms / 1000):
                await self._reap_now(prefix, is_tidying)
        except _TROUBLE as error:
            log.warning("not reaped: %s: %s: %s", prefix, type(error).__name__, error)

    async def _reap_now(self, prefix: str, is_tidying: bool) -> None:
        redis = self._shards.shard_of(prefix).redis
        reply: ReapReply = await calls.run(redis, reap(prefix, lease_ms=self._lease_ms, policy=self._policy))
        if reply.moved or reply.buried:
            log.info("reaped %s: %d to resume, %d dead letters", prefix, reply.moved, reply.buried)
        if reply.mended:
            log.warning("%s: %d jobs had lost their place: who deletes streams?", prefix, reply.mended)
        if is_tidying:
            call = tidy(prefix, lease_ms=self._lease_ms, dead_ttl_ms=self._policy.dead_ttl_ms)
            await calls.run(redis, call)
