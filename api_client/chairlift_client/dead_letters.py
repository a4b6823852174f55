"""Jobs that were given up: what an operator sees of them, and can do about them.

A letter id is `<model>.<partition>.<ms>-<n>`: who has it knows the shard and when the job was given up.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import AsyncGenerator
from typing import NamedTuple, Self, cast

from msgspec import Struct
from redis.exceptions import OutOfMemoryError

from chairlift_client import keys, operations
from chairlift_client.connection import Shards
from chairlift_client.door import OOM_RETRY_S
from chairlift_client.errors import InvalidJob, JobExpired, QueueFull
from chairlift_client.listing import Listing
from chairlift_client.operations import Letter
from chairlift_client.protocol import JobBody, JobClass, ModelInfo, decode_body
from chairlift_client.request import DEFAULT_QUEUE_TTL_S, DEFAULT_RESULT_TTL_S

PAGE_LETTERS = 100

_LETTER_ID = re.compile(r"([A-Za-z0-9._/-]{1,96})\.([0-9]{1,4})\.([0-9]{1,16}-[0-9]{1,10})")


class DeadLetter(Struct, frozen=True, kw_only=True):
    """A job that was given up. Times are ms since the epoch by the server's clock.

    `losses` counts leases lost in a row without one new token, `failures` the attempts that failed,
    `attempts` all of them; `worker` had the last one. `body` is there in `Client.dead_letter` only.
    """

    letter_id: str
    job_id: str
    reason: str
    job_class: JobClass
    tenant: str
    losses: int
    failures: int
    attempts: int
    worker: str
    submitted_ms: int
    died_ms: int
    body: JobBody | None = None


class LetterId(NamedTuple):
    """The parts of a letter id; `entry` is its place in the partition's stream of dead letters."""

    model: str
    partition: int
    entry: str

    @classmethod
    def parse(cls, text: str) -> Self:
        """InvalidJob where it is none."""
        match = _LETTER_ID.fullmatch(text)
        if match is None:
            raise InvalidJob(f"no dead letter's id: {text[:150]!r} (expected <model>.<partition>.<ms>-<n>)")
        return cls(match[1], int(match[2]), match[3])

    def __str__(self) -> str:
        return f"{self.model}.{self.partition}.{self.entry}"

    @property
    def place(self) -> tuple[int, ...]:
        """What orders letters by age."""
        ms, _, number = self.entry.partition("-")
        return int(ms), int(number), self.partition

    def describe(self, fields: Letter) -> DeadLetter:
        """The letter as plain data."""
        texts = {name: value.decode(errors="replace") for name, value in fields.items() if name != "body"}
        return DeadLetter(
            letter_id=str(self),
            job_id=texts["id"],
            reason=texts["reason"],
            job_class=cast(JobClass, texts["class"]),
            tenant=texts["tenant"],
            losses=int(texts["losses"]),
            failures=int(texts["failures"]),
            attempts=int(texts["attempts"]),
            worker=texts["worker"],
            submitted_ms=int(texts["submitted"]),
            died_ms=self.place[0],
            body=decode_body(fields["body"]) if fields["body"] else None,
        )


class DeadLetters:
    """The dead letters of one namespace."""

    def __init__(self, shards: Shards, namespace: str) -> None:
        self._shards = shards
        self._namespace = namespace

    async def all(self, model: str) -> AsyncGenerator[DeadLetter, None]:
        """Those of all partitions, merged: the oldest of their heads is next."""
        known = await Listing(self._shards, self._namespace).models()
        info = known.get(model) or ModelInfo(fingerprint="")
        piles = [_Pile(self._shards, self._namespace, model, number) for number in range(info.partitions)]
        for pile in piles:
            await pile.fill()
        while fullest := [pile for pile in piles if pile.letters]:
            oldest = min(fullest, key=lambda pile: pile.letters[0][0].place)
            letter_id, fields = oldest.letters.popleft()
            yield letter_id.describe(fields)
            await oldest.fill()

    async def read(self, text: str) -> DeadLetter:
        """One letter with its body. Raises InvalidJob, JobExpired."""
        letter_id = LetterId.parse(text)
        fields = await self._shards.run(operations.dead_read(self._prefix(letter_id), letter_id.entry))
        if not fields:
            raise _gone(letter_id)
        return letter_id.describe(fields)

    async def retry(self, text: str) -> bool:
        """A new life for the job; False where it lives already. Raises InvalidJob, JobExpired, QueueFull."""
        letter_id = LetterId.parse(text)
        call = operations.dead_retry(
            self._prefix(letter_id),
            letter_id.entry,
            queue_ttl_ms=round(DEFAULT_QUEUE_TTL_S * 1000),
            result_ttl_ms=round(DEFAULT_RESULT_TTL_S * 1000),
        )
        try:
            answer = await self._shards.run(call)
        except OutOfMemoryError as error:
            raise QueueFull("memory of the server", retry_after_s=OOM_RETRY_S) from error
        if answer == "absent":
            raise _gone(letter_id)
        return answer != "live"

    async def drop(self, text: str) -> bool:
        """Whether the letter was there. Raises InvalidJob."""
        letter_id = LetterId.parse(text)
        return await self._shards.run(operations.dead_drop(self._prefix(letter_id), letter_id.entry)) > 0

    def _prefix(self, letter_id: LetterId) -> str:
        return keys.prefix(self._namespace, letter_id.model, letter_id.partition)


class _Pile:
    """The letters of one partition, a page at a time."""

    def __init__(self, shards: Shards, namespace: str, model: str, partition: int) -> None:
        self.letters: deque[tuple[LetterId, Letter]] = deque()
        self._shards = shards
        self._prefix = keys.prefix(namespace, model, partition)
        self._model = model
        self._partition = partition
        self._last = "-"
        self._is_over = False

    async def fill(self) -> None:
        """Reads the next page when this one is used up."""
        if self.letters or self._is_over:
            return
        page = await self._shards.run(operations.dead_list(self._prefix, self._last, PAGE_LETTERS))
        self.letters.extend((LetterId(self._model, self._partition, entry), fields) for entry, fields in page)
        self._is_over = len(page) < PAGE_LETTERS
        self._last = page[-1][0] if page else self._last


def _gone(letter_id: LetterId) -> JobExpired:
    return JobExpired(f"no such dead letter (any more): {letter_id}", job_id=str(letter_id))
