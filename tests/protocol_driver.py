"""The protocol's functions called one by one on a real server, and a look at everything that they keep.

Time is not waited for. Leases are long here, and `lapse` makes pending entries old; `make_due` and
`make_overdue` move a job's time into the past, where the functions look for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import redis

from chairlift_client import functions, keys
from chairlift_client.calls import Call
from chairlift_client.operations import Submission, SubmitReply, submit
from chairlift_client.protocol import (
    ChoiceDelta,
    Finished,
    JobClass,
    LoggedEvent,
    Tokens,
    decode_event,
    encode,
)
from chairlift_client.worker_operations import (
    ClaimedJob,
    ClaimReply,
    Emission,
    ReapReply,
    RenewReply,
    RetryPolicy,
    claim,
    emit,
    finish,
    reap,
    renew,
)

T = TypeVar("T")

LEASE_MS = 60_000
POLICY = RetryPolicy(
    max_failures=2, max_losses=3, first_backoff_ms=3_600_000, max_backoff_ms=7_200_000, dead_count=1000
)
GAUGES = ("waiting", "delayed", "running", "bytes", "jobs")
HEARTBEATS = ("tick", "quiet", "audit", "wake", "claims", "clearing")
"""Keys that change with every call, whatever it does."""


def job_number(index: int, model: str = "m", partition: int = 0) -> str:
    """A job id that sorts by its number."""
    return str(keys.JobId(model, partition, f"{index:022d}"))


def submission(
    job_id: str,
    body: bytes = b"body",
    *,
    version: int = 1,
    job_class: JobClass = "normal",
    tenant: str = "t",
    cost: int = 10,
    deadline_ms: int = 0,
    delay_ms: int = 0,
    run_at_ms: int = 0,
    queue_ttl_ms: int = 86_400_000,
    result_ttl_ms: int = 3_600_000,
    idempotency: str = "",
    body_hash: str = "",
    prompt_tokens: int = 0,
    output_tokens: int = 0,
    allow_unknown: bool = True,
) -> Submission:
    """A submission with everything ordinary that is not said."""
    return Submission(
        job_id, body, version, job_class, tenant, cost, 7, deadline_ms, delay_ms, run_at_ms, queue_ttl_ms,
        result_ttl_ms, idempotency, body_hash, prompt_tokens, output_tokens, allow_unknown,
    )  # fmt: skip


def tokens_event(seq: int, epoch: int, offset: int, count: int) -> bytes:
    """A Tokens event of `count` tokens, which are numbered by their place."""
    ids = tuple(range(offset, offset + count))
    return encode(Tokens(seq, epoch, 0, (ChoiceDelta(0, offset, ids, "x" * count),)))


class Driver:
    """One partition of one server."""

    def __init__(self, client: redis.Redis, namespace: str, model: str = "m", partition: int = 0) -> None:
        self.redis: Any = client
        # redis-py types each answer of its blocking client as possibly awaitable.
        self.shared = keys.shared(namespace)
        self.prefix = keys.prefix(namespace, model, partition)
        self.numbers: dict[str, int] = {}

    def load(self) -> None:
        """Load the function library."""
        try:
            self.redis.execute_command("FUNCTION", "LOAD", functions.source())
        except redis.ResponseError as error:
            if "already exists" not in str(error):
                raise

    def run(self, call: Call[T]) -> T:
        """One call, its parsed answer."""
        return call.parse(self.redis.execute_command(*call.command()))

    # The usual calls, in short.

    def submit(self, job_id: str, body: bytes = b"body", **options: Any) -> SubmitReply:
        return self.run(submit(self.prefix, submission(job_id, body, **options)))

    def claim_call(
        self,
        worker: str,
        number: int,
        capacity: int = 100,
        *,
        on_board: int = 0,
        carries_suspect: bool = False,
        version: int = 1,
    ) -> Call[ClaimReply]:
        return claim(
            self.prefix, worker, number, capacity, lease_ms=LEASE_MS, version=version, on_board=on_board,
            carries_suspect=carries_suspect,
        )  # fmt: skip

    def claim(self, worker: str, capacity: int = 100, **options: Any) -> ClaimReply:
        """A claim with the worker's next request number."""
        number = self.numbers[worker] = self.numbers.get(worker, -1) + 1
        return self.run(self.claim_call(worker, number, capacity, **options))

    def take(self, worker: str, capacity: int = 100, **options: Any) -> tuple[ClaimedJob, ...]:
        return self.claim(worker, capacity, **options).jobs

    def emit(self, worker: str, job_id: str, epoch: int, seq: int, *, offset: int = 0, count: int = 1) -> str:
        event = tokens_event(seq, epoch, offset, count)
        answers = self.run(emit(self.prefix, worker, [Emission(job_id, epoch, seq, count, event)]))
        return answers[0]

    def finish(self, worker: str, job_id: str, epoch: int, seq: int, *, tokens: int = 10) -> str:
        event = encode(Finished(seq, epoch, 0))
        call = finish(
            self.prefix, worker, job_id, epoch, seq=seq, state="finished", event=event, result=b"result",
            tokens=tokens,
        )  # fmt: skip
        return self.run(call)

    def complete(self, worker: str, job: ClaimedJob, *, tokens: int = 10) -> None:
        """One token and the end."""
        offset = sum(count_tokens(decode_event(event)) for event in job.log)
        assert self.emit(worker, job.job_id, job.epoch, job.seq + 1, offset=offset) == "ok"
        assert self.finish(worker, job.job_id, job.epoch, job.seq + 2, tokens=tokens) == "ok"

    def renew(self, worker: str, *attempts: tuple[str, int]) -> RenewReply:
        return self.run(renew(self.prefix, worker, LEASE_MS, attempts))

    def reap(self, policy: RetryPolicy = POLICY) -> ReapReply:
        return self.run(reap(self.prefix, lease_ms=LEASE_MS, policy=policy))

    # Time.

    def lapse(self, worker: str | None = None) -> None:
        """The leases of a worker, or of all, were not renewed for two leases."""
        for stream in self.streams():
            key = f"{self.prefix}:{stream}"
            for entry in self.pending(stream):
                if worker in (None, entry["consumer"]):
                    self.redis.xclaim(
                        key, keys.GROUP, entry["consumer"], 0, [entry["id"]], idle=2 * LEASE_MS, justid=True
                    )

    def make_due(self, job_id: str) -> None:
        """A delayed job's time has come."""
        self.redis.zadd(f"{self.prefix}:later", {job_id: 0}, xx=True)

    def make_overdue(self, job_id: str, *, deadline: bool = False) -> None:
        """A waiting job's queue lifetime, or its deadline, has passed."""
        self.redis.zadd(f"{self.prefix}:live", {job_id: 0}, xx=True)
        if deadline:
            self.redis.hset(keys.job(self.prefix, job_id), "deadline", 1)

    def go_silent(self) -> None:
        """The server was away for two leases: that long ago was the last sign of life."""
        tick = self.redis.get(f"{self.prefix}:tick")
        if tick is not None:
            self.redis.set(f"{self.prefix}:tick", int(tick) - 2 * LEASE_MS, px=LEASE_MS)

    def end_quiet(self) -> None:
        """The lease of quiet after an absence is over."""
        self.redis.delete(f"{self.prefix}:quiet")

    def delete_stream(self, stream: str) -> None:
        """An operator's DEL. Comes back in the next millisecond, so that no new entry has an old id."""
        self.redis.delete(f"{self.prefix}:{stream}")
        start = self.now_ms()
        while self.now_ms() == start:
            pass

    def now_ms(self) -> int:
        seconds, micros = self.redis.time()
        return int(seconds) * 1000 + int(micros) // 1000

    # Looking in.

    def names(self) -> list[str]:
        """Keys of the partition, without its prefix."""
        found = self.redis.scan_iter(match=self.prefix + ":*", count=10_000)
        return sorted(key.decode().removeprefix(self.prefix + ":") for key in found)

    def streams(self) -> list[str]:
        """Queue streams."""
        return [name for name in self.names() if name.startswith("q:")]

    def pending(self, stream: str) -> list[dict[str, str]]:
        """Pending entries of a stream: id and consumer."""
        rows = self.redis.xpending_range(f"{self.prefix}:{stream}", keys.GROUP, "-", "+", 10_000)
        return [{"id": row["message_id"].decode(), "consumer": row["consumer"].decode()} for row in rows]

    def line(self, stream: str) -> list[str]:
        """Job ids of a stream, that nobody has taken, in order."""
        taken = {entry["id"] for entry in self.pending(stream)} if stream in self.streams() else set()
        entries = self.redis.xrange(f"{self.prefix}:{stream}")
        return [fields[b"id"].decode() for entry, fields in entries if entry.decode() not in taken]

    def job(self, job_id: str) -> dict[str, str]:
        """The job's hash, without what is not text."""
        fields = self.redis.hgetall(keys.job(self.prefix, job_id))
        return {key.decode(): value.decode("latin-1") for key, value in fields.items()}

    def state(self, job_id: str) -> str | None:
        return self.job(job_id).get("state")

    def log(self, job_id: str) -> list[LoggedEvent]:
        """The event log, after checking that its entries are numbered 1, 2, 3, …"""
        entries = self.redis.xrange(keys.events(self.prefix, job_id))
        events = [decode_event(fields[b"e"]) for _, fields in entries]
        assert [entry.decode() for entry, _ in entries] == [f"{i}-0" for i in range(1, len(entries) + 1)]
        assert [event.seq for event in events] == list(range(1, len(events) + 1))
        return events

    def gauges(self) -> dict[str, int]:
        """The counters that tell what there is now."""
        counters = self.redis.hgetall(f"{self.prefix}:n")
        return {
            key.decode(): int(value)
            for key, value in counters.items()
            if key.decode().split(":")[0] in GAUGES
        }

    def counter(self, name: str) -> float:
        return float(self.redis.hget(f"{self.prefix}:n", name) or 0)

    def snapshot(self) -> dict[str, object]:
        """All that the partition's keys hold, but for what changes with every call."""
        names = [name for name in self.names() if name.split(":")[0] not in HEARTBEATS]
        pipeline = self.redis.pipeline(transaction=False)
        for name in names:
            pipeline.type(f"{self.prefix}:{name}")
        kinds = [kind.decode() for kind in pipeline.execute()]
        readers = {
            "string": lambda key: pipeline.get(key),
            "hash": lambda key: pipeline.hgetall(key),
            "list": lambda key: pipeline.lrange(key, 0, -1),
            "zset": lambda key: pipeline.zrange(key, 0, -1, withscores=True),
            "stream": lambda key: pipeline.xrange(key),
        }
        for name, kind in zip(names, kinds, strict=True):
            readers[kind](f"{self.prefix}:{name}")
        seen: dict[str, object] = dict(zip(names, pipeline.execute(), strict=True))
        for name in names:
            if name.startswith("q:"):
                seen["pending " + name] = self.pending(name)
        return seen

    def without_expiry(self) -> list[str]:
        """Keys that would stay for ever."""
        pipeline = self.redis.pipeline(transaction=False)
        names = self.names()
        for name in names:
            pipeline.pttl(f"{self.prefix}:{name}")
        return [name for name, ttl in zip(names, pipeline.execute(), strict=True) if ttl < 0]

    def assert_nothing_is_left(self) -> None:
        """All jobs have ended: no place, no gauge, no lease; and every key has an end."""
        leftovers = [
            name
            for name in self.names()
            if name.split(":")[0] in ("q", "held", "later", "live", "active", "served")
        ]
        assert leftovers == []
        assert self.gauges() == {}
        assert self.without_expiry() == []


def count_tokens(event: LoggedEvent) -> int:
    """Output tokens of an event."""
    return sum(len(choice.token_ids) for choice in event.choices) if isinstance(event, Tokens) else 0


def assert_log_is_whole(events: Sequence[LoggedEvent]) -> None:
    """Offsets follow one another, epochs never fall, and nothing comes after a terminal event."""
    offset = 0
    for event in events:
        if isinstance(event, Tokens):
            for choice in event.choices:
                assert choice.offset == offset
                offset += len(choice.token_ids)
    epochs = [event.epoch for event in events]
    assert epochs == sorted(epochs)
