"""What one subscriber heard of one job, checked event by event."""

from __future__ import annotations

import asyncio

from chairlift_client import Client
from chairlift_client.protocol import (
    TERMINAL_EVENTS,
    ChoiceDelta,
    Event,
    Finished,
    JobResult,
    Queued,
    Tokens,
)


class Transcript:
    """Collects a stream and knows what has to hold of it."""

    def __init__(self, job_id: str, after_seq: int = 0) -> None:
        self.job_id = job_id
        self.after_seq = after_seq
        self.events: list[Event] = []
        self.has_tokens = asyncio.Event()

    @property
    def text(self) -> str:
        """The joined text deltas."""
        return "".join(delta.text for delta in self._deltas())

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The joined tokens."""
        return tuple(token for delta in self._deltas() for token in delta.token_ids)

    async def listen(self, client: Client) -> None:
        """Read the stream to its end."""
        async for event in client.stream(self.job_id, self.after_seq):
            self.events.append(event)
            if isinstance(event, Tokens):
                self.has_tokens.set()

    def check(self, result: JobResult) -> None:
        """Every event once and in order, every token once and in order, the text that of the result."""
        logged = [event for event in self.events if not isinstance(event, Queued)]
        expected = range(self.after_seq + 1, self.after_seq + 1 + len(logged))
        assert [event.seq for event in logged] == list(expected), self.job_id
        assert isinstance(logged[-1], Finished), logged[-1]
        assert sum(isinstance(event, TERMINAL_EVENTS) for event in logged) == 1
        choice = result.choices[0]
        offset = self._deltas()[0].offset if self._deltas() else len(choice.token_ids)
        for delta in self._deltas():
            assert delta.offset == offset, self.job_id
            offset += len(delta.token_ids)
        if self.after_seq == 0:
            assert self.text == choice.text, self.job_id
            assert self.token_ids == choice.token_ids, self.job_id
        else:
            assert choice.text.endswith(self.text), self.job_id
            assert self.token_ids == choice.token_ids[len(choice.token_ids) - len(self.token_ids) :]

    def _deltas(self) -> list[ChoiceDelta]:
        return [delta for event in self.events if isinstance(event, Tokens) for delta in event.choices]
