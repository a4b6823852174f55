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
    Resumed,
    Tokens,
)


class Transcript:
    """Collects a stream and knows what has to hold of it."""

    def __init__(self, job_id: str, after_seq: int = 0) -> None:
        self.job_id = job_id
        self.after_seq = after_seq
        self.events: list[Event] = []
        self.has_tokens = asyncio.Event()
        self._listening: asyncio.Task[None] | None = None

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

    def start(self, client: Client) -> None:
        """Listen in a task of its own."""
        self._listening = asyncio.create_task(self.listen(client))

    async def finish(self) -> None:
        """Wait for the end of what was started."""
        assert self._listening is not None
        async with asyncio.timeout(30):
            await self._listening

    async def stop(self) -> None:
        """Do not listen any more."""
        assert self._listening is not None
        self._listening.cancel()
        await asyncio.wait([self._listening])

    def resume_gaps_ms(self) -> list[int]:
        """From the last event of one attempt to the first tokens of the next, by the server's clock."""
        logged = [event for event in self.events if not isinstance(event, Queued)]
        gaps: list[int] = []
        for before, event, after in zip(logged, logged[1:], logged[2:], strict=False):
            if isinstance(event, Resumed):
                gaps.append(after.at_ms - before.at_ms)
        return gaps

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
