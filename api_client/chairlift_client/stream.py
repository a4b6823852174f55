"""What a subscriber does: live events where possible, the log wherever the live channel may have lost some.

The order is what makes it gapless: first the confirmed subscription, then the log, then live. A gap, a
reconnect, an overflow or a second of silence sends it back to the log and the job's state, since the last
publish of a job can be lost and nothing later would show it.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any, NamedTuple, cast

from redis.exceptions import RedisError

from chairlift_client import keys, operations
from chairlift_client.connection import Shard, Shards
from chairlift_client.errors import JobExpired, LogRewound
from chairlift_client.merge import LogChanged, LogEntry, LogNeeded, Merger
from chairlift_client.protocol import (
    TERMINAL_EVENTS,
    TERMINAL_STATES,
    Event,
    JobState,
    Queued,
    decode_event,
)
from chairlift_client.subscription import Subscription

SILENCE_S = 1.0
PAGE_EVENTS = 512


class Page(NamedTuple):
    """A piece of the log, and the job as it was just before: its state and the last seq of the log."""

    state: JobState
    log_seq: int
    entries: list[LogEntry]


class Feed:
    """Where the events of one job come from. Subscribes again when its shard moves."""

    def __init__(self, shards: Shards, prefix: str, job_id: str, *, silence_s: float = SILENCE_S) -> None:
        self.job_id = job_id
        self._shards = shards
        self._prefix = prefix
        self._silence_s = silence_s
        self._shard: Shard | None = None
        self._subscription: Subscription | None = None

    async def subscribe(self) -> None:
        """Listens on the shard that has the job now, unless it does; returns once the server confirms."""
        if self._shard is not None and self._shard is self._shards.shard_of(self._prefix):
            return
        self.close()
        self._shard, self._subscription = await self._shards.call(self._prefix, self._subscribe_at)

    async def next_live(self) -> bytes | None:
        """The next message; None when the log has to be looked at."""
        assert self._subscription is not None, "subscribe comes first"
        try:
            return await self._subscription.get(self._silence_s)
        except RedisError:  # the server ended the subscription: the slot has moved
            await self._shards.refresh()
            self.close()
            return None

    async def page(self, from_seq: int) -> Page:
        """The log from `from_seq` on, a page of it at most. Raises JobExpired where there is no such job."""
        fields, entries = await self._shards.call(self._prefix, lambda shard: self._read(shard, from_seq))
        state, log_seq = fields
        if state is None:
            raise JobExpired(f"no such job (any more): {self.job_id}", job_id=self.job_id)
        return Page(
            cast(JobState, state.decode()),
            int(log_seq or 0),
            [LogEntry(int(entry_id.partition(b"-")[0]), fields[b"e"]) for entry_id, fields in entries],
        )

    async def queued(self) -> Queued | None:
        """Where the job stands in line; None when it does not wait."""
        status = await self._shards.run(operations.status(self._prefix, self.job_id))
        if status is None or status.state not in ("waiting", "delayed"):
            return None
        eta_ms = status.due_ms - status.now_ms if status.state == "delayed" else status.eta_ms
        return Queued(0, status.position, max(0, eta_ms) / 1000 if eta_ms >= 0 else None)

    def close(self) -> None:
        """Ends the subscription."""
        if self._subscription is not None:
            self._subscription.close()
        self._shard = self._subscription = None

    async def _subscribe_at(self, shard: Shard) -> tuple[Shard, Subscription]:
        channel = keys.channel(self._prefix, self.job_id)
        return shard, await shard.live.subscribe(channel, timeout_s=self._shards.retry_s)

    async def _read(self, shard: Shard, from_seq: int) -> Any:
        async with shard.redis.pipeline(transaction=False) as pipeline:
            pipeline.hmget(keys.job(self._prefix, self.job_id), ["state", "seq"])
            pipeline.xrange(keys.events(self._prefix, self.job_id), f"{from_seq}-0", "+", count=PAGE_EVENTS)
            return await pipeline.execute()


async def wait_for_end(feed: Feed) -> None:
    """Returns when the job has ended. Raises JobExpired where there is no such job (any more)."""
    try:
        while True:
            await feed.subscribe()
            if (await feed.page(1)).state in TERMINAL_STATES:
                return
            while (data := await feed.next_live()) is not None:
                if isinstance(decode_event(data), TERMINAL_EVENTS):
                    return
    finally:
        feed.close()


class Follower:
    """Every event of a job after `after_seq`, once and in order, up to the terminal one."""

    def __init__(self, feed: Feed, after_seq: int) -> None:
        self._feed = feed
        self._merger = Merger(feed.job_id, after_seq)
        self._queued: Queued | None = None
        self._is_over = False

    async def events(self) -> AsyncGenerator[Event, None]:
        """To be iterated once. Raises JobExpired, LogRewound, ServerUnavailable."""
        try:
            while not self._is_over:
                await self._feed.subscribe()
                for source in (self._catch_up, self._place_in_line, self._live):
                    async for event in source():
                        yield event
                        if isinstance(event, TERMINAL_EVENTS):
                            return
        finally:
            self._feed.close()

    async def _catch_up(self) -> AsyncGenerator[Event, None]:
        """What the log has beyond the delivered events."""
        was_rewound = False
        while True:
            page = await self._feed.page(self._merger.read_from)
            self._merger.check_reaches(page.log_seq)
            before = self._merger.last_seq
            try:
                for event in self._merger.logged(page.entries, page.log_seq):
                    yield event
            except LogChanged:
                if was_rewound:
                    raise self._out_of_order() from None
                self._merger.rewind()
                was_rewound = True
                continue
            if self._merger.last_seq >= page.log_seq:
                self._is_over = page.state in TERMINAL_STATES
                return
            if self._merger.last_seq == before:
                raise JobExpired(f"the events of {self._feed.job_id} are gone", job_id=self._feed.job_id)

    async def _place_in_line(self) -> AsyncGenerator[Event, None]:
        """Where the job stands, while nothing else is known of it, and again when that has changed."""
        if self._merger.last_seq == 0 and not self._is_over:
            before, self._queued = self._queued, await self._feed.queued()
            if self._queued is not None and self._queued != before:
                yield self._queued

    async def _live(self) -> AsyncGenerator[Event, None]:
        """Live events, until the log is needed."""
        while not self._is_over and (data := await self._feed.next_live()) is not None:
            try:
                event = self._merger.live(data)
            except LogNeeded:
                return
            if event is not None:
                yield event

    def _out_of_order(self) -> LogRewound:
        last_seq = self._merger.last_seq
        return LogRewound(f"the log is not in order after event {last_seq}", job_id=self._feed.job_id)
