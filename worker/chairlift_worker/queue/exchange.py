"""The one conversation with a shard: a pipeline out with each step's events, endings and claims, one in.

    engine reports ─┐
    wake-ups ───────┼─→ ring ─→ turn: [emit …, finish …, claim …] ─→ shard ─→ answers ─→ service
    due times ──────┘

A turn that fails is sent again as it was, with what has come in meanwhile behind it and the same claim
numbers, until the server has answered all of it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Any, Protocol

from redis.exceptions import RedisError

from chairlift_client import calls
from chairlift_client.connection import Shards
from chairlift_client.errors import ServerUnavailable
from chairlift_client.protocol import SCHEMA_VERSION
from chairlift_client.retry import Backoff, is_elsewhere
from chairlift_client.worker_operations import ClaimReply, claim
from chairlift_worker.queue.attempts import Board
from chairlift_worker.queue.clock import ServerClock
from chairlift_worker.queue.outbox import Outbox, Parcel

log = logging.getLogger(__name__)


class Answers(Protocol):
    """Who hears what the server said."""

    def claimed(self, prefix: str, reply: ClaimReply) -> None:
        """New jobs and cancels of one partition."""
        ...

    def answered(self, parcel: Parcel, answers: Sequence[str]) -> None:
        """One answer for each of the parcel's attempts."""
        ...


class Exchange:
    """Talks with the shard that serves `prefixes`."""

    def __init__(
        self,
        shards: Shards,
        prefixes: Sequence[str],
        worker: str,
        *,
        lease_ms: int,
        board: Board,
        outbox: Outbox,
        clock: ServerClock,
        answers: Answers,
    ) -> None:
        self._shards = shards
        self._prefixes: list[str] = []
        self._worker = worker
        self._lease_ms = lease_ms
        self._board = board
        self._outbox = outbox
        self._clock = clock
        self._answers = answers
        self._ring = asyncio.Event()
        self._numbers: dict[str, int] = {}
        self._unanswered: list[Parcel] = []
        self._wait_s = 0.0
        self._patience_s = lease_ms / 1000
        self.first_wakes: asyncio.Future[dict[str, str]]
        """Where the wake streams stood at the first claim after `serve`."""
        self.num_turns = 0
        self.serve(prefixes)

    def serve(self, prefixes: Sequence[str]) -> None:
        """Talk of these too. Not while `run` runs; what it left unanswered goes again when it runs next."""
        self._prefixes += prefixes
        self._numbers.update(dict.fromkeys(prefixes, 0))
        self.first_wakes = asyncio.get_running_loop().create_future()

    def ring(self) -> None:
        """There is something to send, or to fetch."""
        self._ring.set()

    async def run(self) -> None:
        """Turn after turn, for ever."""
        while True:
            await self._turn_until_answered()
            await self._wait()

    async def flush(self) -> None:
        """Hear the answer to a claim that was cut off, and send what stands in the box."""
        await self._turn_until_answered()
        while self._outbox.holds(self._prefixes) or self._unanswered:
            await self._turn_until_answered()

    async def _wait(self) -> None:
        try:
            async with asyncio.timeout(self._wait_s):
                await self._ring.wait()
        except TimeoutError:
            pass

    async def _turn_until_answered(self) -> None:
        backoff = Backoff(last_s=self._lease_ms / 3000)  # what is owed should go out before leases lapse
        answered = await self._turn()
        while not answered:
            await asyncio.sleep(backoff.next_s())
            answered = await self._turn()

    async def _turn(self) -> bool:
        """One pipeline out, one in. False when any of it has to go again."""
        self._ring.clear()
        self._unanswered += self._outbox.take(self._prefixes)
        shares = self._share_capacity()
        claims = [self._claim(prefix, share) for prefix, share in shares.items()]
        parcels = list(self._unanswered)
        try:
            replies = await self._send([*(parcel.call for parcel in parcels), *claims])
        finally:
            self._board.unreserve(sum(shares.values()))
        if replies is None:
            return False
        self.num_turns += 1
        del self._unanswered[: len(parcels)]
        for parcel, reply in zip(parcels, replies, strict=False):
            self._answers.answered(parcel, (reply,) if isinstance(reply, str) else reply)
        self._take_claims(shares, replies[len(parcels) :])
        return True

    async def _send(self, pipeline: list[Any]) -> list[Any] | None:
        try:
            shard = self._shards.shard_of(self._prefixes[0])
            # A connection that is half open would keep events back for as long as the socket's timeout.
            async with asyncio.timeout(self._patience_s):
                replies = await calls.run_many(shard.redis, pipeline)
        except (RedisError, ServerUnavailable, TimeoutError) as error:
            if isinstance(error, TimeoutError):
                self._patience_s *= 2  # or it is slow: to ask again and again makes it no faster
            await self._trouble(error)
            return None
        self._patience_s = self._lease_ms / 1000
        for reply in replies:
            if isinstance(reply, RedisError):
                await self._trouble(reply)
                return None
        return replies

    async def _trouble(self, error: Exception) -> None:
        log.warning("redis: %s: %s", type(error).__name__, error)
        if isinstance(error, RedisError) and is_elsewhere(error):
            try:
                await self._shards.refresh()
            except ServerUnavailable as unavailable:
                log.warning("redis: %s", unavailable)

    def _share_capacity(self) -> dict[str, int]:
        """Places for each partition, spread evenly; who comes first changes from turn to turn."""
        if self._board.clearing_for is not None:
            return {prefix: self._board.reserve_for(prefix) for prefix in self._prefixes}
        free = self._board.reserve()
        count = len(self._prefixes)
        first = self.num_turns % count
        return {
            prefix: free // count + ((index - first) % count < free % count)
            for index, prefix in enumerate(self._prefixes)
        }

    def _claim(self, prefix: str, capacity: int) -> calls.Call[ClaimReply]:
        return claim(
            prefix,
            self._worker,
            self._numbers[prefix],
            capacity,
            lease_ms=self._lease_ms,
            version=SCHEMA_VERSION,
            on_board=len(self._board),
            carries_suspect=self._board.carries_suspect,
        )

    def _take_claims(self, shares: dict[str, int], replies: Sequence[ClaimReply]) -> None:
        self._wait_s = self._lease_ms / 3000
        hungry = False
        for (prefix, share), reply in zip(shares.items(), replies, strict=True):
            self._numbers[prefix] += 1
            self._clock.observe(reply.now_ms)
            if reply.next_due_ms >= 0:
                self._wait_s = min(self._wait_s, reply.next_due_ms / 1000 + 0.001)
            hungry |= 0 < share == len(reply.jobs)
            self._board.note_clearing(prefix, reply.clearing)
            self._answers.claimed(prefix, reply)
        if not self.first_wakes.done():
            self.first_wakes.set_result(
                {prefix: reply.last_wake for prefix, reply in zip(shares, replies, strict=True)}
            )
        if hungry and len(self._prefixes) > 1 and self._board.free_places:
            self.ring()  # a partition gave all it was asked for: it may have more
