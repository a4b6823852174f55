"""One job of a chaos run: what was asked for, and what a subscriber heard of it."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any, NamedTuple

from chairlift_client import Client
from chairlift_client.errors import ChairliftError, LogRewound, ServerUnavailable
from chairlift_client.protocol import TERMINAL_EVENTS, LoggedEvent, Queued, Resumed, Started, Tokens


class Ask(NamedTuple):
    """`order` is the index in the pool; the rest is what producers do to it."""

    order: int
    options: dict[str, Any]
    cancel_after: int | None
    """Cancel after so many events."""
    restarts: float
    """How likely the subscriber is to hang up after an event, and to come back."""


def draw_ask(rng: random.Random, num_orders: int, serial: int) -> Ask:
    """Some are delayed, cancelled, have a deadline, a tenant, or an idempotency key."""
    options: dict[str, Any] = {
        "job_class": rng.choice(("high", "normal", "normal", "low", "batch")),
        "tenant": rng.choice(("one", "two", "three")),
        "idempotency_key": f"key-{serial}",
    }
    if rng.random() < 0.1:
        options["delay_s"] = rng.uniform(0.1, 2.0)
    if rng.random() < 0.03:
        options["deadline_s"] = rng.uniform(0.1, 3.0)
    cancel_after = rng.randint(0, 20) if rng.random() < 0.08 else None
    return Ask(rng.randrange(num_orders), options, cancel_after, rng.choice((0.0, 0.0, 0.02, 0.1)))


class Case:
    """A job, from submit to the end of its stream."""

    def __init__(self, job_id: str, ask: Ask) -> None:
        self.job_id = job_id
        self.ask = ask
        self.heard: list[LoggedEvent] = []
        self.errors: Counter[str] = Counter()
        self.is_rewound = False
        self._num_tokens = 0
        self.is_gone = False
        self.worker = ""
        self.killed_ms = 0
        """When its worker was killed; 0 when it has made tokens since."""
        self.resume_ms: list[int] = []

    @property
    def is_over(self) -> bool:
        """Whether the terminal event was heard."""
        return bool(self.heard) and isinstance(self.heard[-1], TERMINAL_EVENTS)

    @property
    def last_seq(self) -> int:
        """The newest event heard."""
        return self.heard[-1].seq if self.heard else 0

    async def follow(self, client: Client, rng: random.Random) -> None:
        """Listen until the end, hanging up now and then, whatever happens to Redis."""
        while not (self.is_over or self.is_rewound or self.is_gone):
            try:
                await self._listen(client, rng)
            except ServerUnavailable as error:
                self.errors[type(error).__name__] += 1
            except LogRewound:
                self.is_rewound = True
            except ChairliftError as error:
                self.errors[type(error).__name__] += 1
                self.is_gone = True

    async def _listen(self, client: Client, rng: random.Random) -> None:
        stream = client.stream(self.job_id, self.last_seq)
        try:
            async for event in stream:
                if isinstance(event, Queued):
                    continue
                self._hear(event)
                if self.is_rewound:
                    return
                if len(self.heard) == self.ask.cancel_after:
                    await client.cancel(self.job_id)
                if rng.random() < self.ask.restarts:
                    return
        finally:
            await stream.aclose()

    def _hear(self, event: LoggedEvent) -> None:
        if isinstance(event, Tokens) and event.choices[0].offset != self._num_tokens:
            # The numbers of events mean something else now. Who comes back with a number alone sees it here.
            self.is_rewound = True
            return
        self.heard.append(event)
        self._num_tokens += sum(len(c.token_ids) for c in getattr(event, "choices", ()))
        if isinstance(event, Started | Resumed):
            self.worker = event.worker
        elif isinstance(event, Tokens) and self.killed_ms and event.at_ms > self.killed_ms:
            self.resume_ms.append(event.at_ms - self.killed_ms)
            self.killed_ms = 0
