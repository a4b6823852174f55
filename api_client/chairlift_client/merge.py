"""One gapless sequence of events out of two sources: the live channel, which may lose, and the log.

A `Merger` holds what one subscriber has been given and decides about each event that arrives. It does no
I/O. Events carry a `seq`; the next one is delivered, an earlier one is a duplicate, a later one means that
something is missing and the log has to be read.

A failover may take events away that were already delivered; the job then goes on from the shorter log and
makes them anew. The merger notices by the bytes of the last event (they hold the attempt and its time) and
reads the log from the start again: tokens that equal the delivered ones are dropped, others are LogRewound.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from msgspec.structs import replace

from chairlift_client.errors import LogRewound
from chairlift_client.protocol import ChoiceDelta, LoggedEvent, Resumed, Started, Tokens, decode_event

REMEMBERED_EVENTS = 4096


class LogNeeded(Exception):
    """Something is missing between what was delivered and what arrived: read the log."""


class LogChanged(Exception):
    """The log is not the one that was delivered from: `rewind`, and read it again."""


class LogEntry(NamedTuple):
    """One entry of the event log."""

    seq: int
    data: bytes


class _Choice:
    """How far one choice was delivered, and how far the log as it is now has been read (the cursor)."""

    def __init__(self, base: int) -> None:
        self.base = base  # output tokens before the first delivered one
        self.token_ids: list[int] = []
        self.num_chars = 0
        self.is_ended = False
        self.cursor_tokens = base
        self.cursor_chars = 0

    @property
    def is_level(self) -> bool:
        """The cursor stands where delivery stands: the usual case."""
        return not self.is_ended and self.num_unread() == 0 and self.cursor_chars == self.num_chars

    def num_unread(self) -> int:
        """Delivered tokens that the cursor has yet to pass."""
        return self.base + len(self.token_ids) - self.cursor_tokens

    def take(self, delta: ChoiceDelta) -> None:
        """Both go on together."""
        self.token_ids.extend(delta.token_ids)
        self.num_chars += len(delta.text)
        self.cursor_tokens += len(delta.token_ids)
        self.cursor_chars += len(delta.text)
        self.is_ended = self.is_ended or delta.finish_reason is not None

    def rewind(self) -> None:
        self.cursor_tokens = self.base
        self.cursor_chars = 0


class Merger:
    """Everything after event `after_seq` of one job, each event once and in order."""

    def __init__(self, job_id: str, after_seq: int = 0) -> None:
        self.last_seq = after_seq
        self._job_id = job_id
        self._after_seq = after_seq
        self._digests: dict[int, int] = {}
        self._choices: dict[int, _Choice] = {}
        self._epoch = 0
        self._has_prompt = False
        self._furthest_seq = after_seq

    @property
    def read_from(self) -> int:
        """The first seq to read of the log: the last delivered one again, to see that it is the same."""
        return max(self.last_seq, self._after_seq + 1)

    def live(self, data: bytes) -> LoggedEvent | None:
        """A message of the live channel: the event to deliver, or None for a duplicate. Raises LogNeeded."""
        event = decode_event(data)
        if event.seq <= self.last_seq:
            if self._digests.get(event.seq) != hash(data):
                raise LogNeeded
            return None
        if event.seq > self.last_seq + 1 or not self._continues(event):
            raise LogNeeded
        return self._deliver(event, data)

    def logged(self, entries: Iterable[LogEntry], log_seq: int) -> Iterator[LoggedEvent]:
        """Entries of the log from `read_from` on; what is to be delivered of them.

        `log_seq` is the last seq of the log as the job knows it. Raises LogChanged when the log is another
        one than what was delivered, and LogRewound when that cannot be made good.
        """
        if log_seq < self.last_seq:
            raise LogChanged
        for seq, data in entries:
            if seq <= self.last_seq:
                if self._digests.get(seq) != hash(data):
                    raise LogChanged
                continue
            event = decode_event(data)
            if seq != self.last_seq + 1 or not self._continues(event):
                raise LogChanged
            delivered = self._deliver(event, data)
            if delivered is not None:
                yield delivered

    def rewind(self) -> None:
        """Begin again at the start of the log. What equals the delivered part will not be delivered again."""
        self.last_seq = self._after_seq
        self._digests.clear()
        for choice in self._choices.values():
            choice.rewind()

    def check_reaches(self, log_seq: int) -> None:
        """Raises LogRewound when the log ends before what the caller says to have had."""
        if log_seq < self._after_seq:
            raise LogRewound(
                f"the log ends at event {log_seq}, before event {self._after_seq} that was already delivered",
                job_id=self._job_id,
            )

    def _continues(self, event: LoggedEvent) -> bool:
        """Whether its tokens begin where the log's tokens so far end."""
        return not isinstance(event, Tokens) or all(
            delta.index not in self._choices or delta.offset == self._choices[delta.index].cursor_tokens
            for delta in event.choices
        )

    def _deliver(self, event: LoggedEvent, data: bytes) -> LoggedEvent | None:
        self.last_seq = event.seq
        self._remember(event.seq, hash(data))
        if isinstance(event, Tokens):
            is_further = event.seq > self._furthest_seq
            self._furthest_seq = max(self._furthest_seq, event.seq)
            if event.candidates and not event.choices and not is_further:
                return None
            return self._fresh_tokens(event)
        if isinstance(event, Started | Resumed):
            is_fresh = event.epoch > self._epoch
            self._epoch = max(self._epoch, event.epoch)
            return event if is_fresh else None
        return event

    def _remember(self, seq: int, digest: int) -> None:
        self._digests[seq] = digest
        self._digests.pop(seq - REMEMBERED_EVENTS, None)

    def _fresh_tokens(self, event: Tokens) -> Tokens | None:
        prompt = None if self._has_prompt else event.prompt
        self._has_prompt = self._has_prompt or event.prompt is not None
        choices = tuple(fresh for delta in event.choices if (fresh := self._fresh_delta(delta)) is not None)
        if choices == event.choices and prompt is event.prompt:
            return event
        if not choices and prompt is None:
            return None
        prompt_logprobs = None if prompt is None else event.prompt_logprobs
        return replace(event, choices=choices, prompt=prompt, prompt_logprobs=prompt_logprobs)

    def _fresh_delta(self, delta: ChoiceDelta) -> ChoiceDelta | None:
        choice = self._choices.setdefault(delta.index, _Choice(delta.offset))
        if choice.is_level:
            choice.take(delta)
            return delta
        start = choice.cursor_tokens - choice.base
        known = choice.token_ids[start : start + len(delta.token_ids)]
        if list(delta.token_ids[: len(known)]) != known:
            raise LogRewound(
                f"the server lost events: choice {delta.index} has other tokens from {delta.offset} on than "
                "those already delivered",
                job_id=self._job_id,
            )
        num_known_chars = min(choice.num_chars - choice.cursor_chars, len(delta.text))
        fresh = replace(
            delta,
            offset=delta.offset + len(known),
            token_ids=delta.token_ids[len(known) :],
            text=delta.text[num_known_chars:],
            logprobs=delta.logprobs[len(known) :],
        )
        was_ended, is_end = choice.is_ended, delta.finish_reason is not None
        choice.cursor_tokens += len(delta.token_ids)
        choice.cursor_chars += len(delta.text)
        choice.token_ids.extend(fresh.token_ids)
        choice.num_chars = max(choice.num_chars, choice.cursor_chars)
        choice.is_ended = was_ended or is_end
        has_news = fresh.token_ids or fresh.text or (is_end and not was_ended)
        is_old = known or num_known_chars or was_ended
        return fresh if has_news or not is_old else None
