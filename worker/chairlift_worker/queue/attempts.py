"""The attempts that this worker holds, and how many more it may take.

One `Attempt` from claim to end. The board owns them; only the event loop's thread touches it.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator

from chairlift_client.protocol import JobBody, LoggedEvent, TokenLogprobs, Tokens, Usage, decode_event
from chairlift_client.worker_operations import ClaimedJob
from chairlift_worker.queue.choices import ChoiceRecords


class Attempt:
    """One job on board. `seq` is that of the last event made for it, sent or not."""

    __slots__ = (
        "adapter",
        "body",
        "choices",
        "first_token_ms",
        "job",
        "leased_at",
        "log",
        "prefix",
        "prompt",
        "prompt_logprobs",
        "proven",
        "seq",
    )

    def __init__(self, prefix: str, job: ClaimedJob) -> None:
        self.prefix = prefix
        self.job = job
        self.seq = job.seq
        self.log: tuple[LoggedEvent, ...] = tuple(decode_event(event) for event in job.log)
        tokens = [event for event in self.log if isinstance(event, Tokens)]
        self.first_token_ms = tokens[0].at_ms if tokens else 0
        self.prompt: Usage | None = tokens[0].prompt if tokens else None
        self.prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = (
            tokens[0].prompt_logprobs if tokens else None
        )
        self.adapter = tokens[0].adapter if tokens else ""
        """Digest of the adapter's weights that its text was begun with; empty without one."""
        self.choices = ChoiceRecords(tokens)
        """What is known of the outputs, held-back tokens included: this attempt goes on after them."""
        self.leased_at = time.monotonic()
        """When the lease last began: now, or when the last renewal that succeeded was sent."""
        self.proven = False
        """This attempt has made a token: the job did not kill its worker."""
        self.body: JobBody | None = None

    @property
    def key(self) -> str:
        """What the engine knows it by: the job and the epoch, so that two attempts never meet."""
        return f"{self.job.job_id} {self.job.epoch}"

    @property
    def is_suspect(self) -> bool:
        """Its last lease was lost without a new token, and it has not shown one since."""
        return self.job.losses > 1 and not self.proven

    @property
    def rides_alone(self) -> bool:
        """Nothing may board beside it."""
        return self.job.alone and not self.proven

    def next_seq(self) -> int:
        """The seq of a new event."""
        self.seq += 1
        return self.seq


class Board:
    """Attempts by key, and the free capacity."""

    def __init__(self, max_num_seqs: int, lookahead: int) -> None:
        self._places = max_num_seqs + lookahead
        self._lookahead = lookahead
        self._attempts: dict[str, Attempt] = {}
        self._reserved = 0
        self.closed = False
        """Draining: no more boarding."""
        self.clearing_for: str | None = None
        """The partition with a job that has to ride alone: nothing is boarded until the board is empty."""
        self.num_stalled = 0
        """Jobs on board that found no room in the KV pool; more than the look-ahead, and none is claimed."""

    def __len__(self) -> int:
        return len(self._attempts)

    def __iter__(self) -> Iterator[Attempt]:
        return iter(tuple(self._attempts.values()))

    def get(self, key: str) -> Attempt | None:
        """The attempt, or None when it is no longer held."""
        return self._attempts.get(key)

    def find(self, job_id: str) -> Attempt | None:
        """The attempt of a job."""
        return next((attempt for attempt in self if attempt.job.job_id == job_id), None)

    def add(self, attempt: Attempt) -> None:
        """Take it on board. An older attempt of the same job is the caller's to drop."""
        self._attempts[attempt.key] = attempt

    def drop(self, key: str) -> Attempt | None:
        """Let it go; None if it was not here."""
        return self._attempts.pop(key, None)

    def reserve(self) -> int:
        """Set all free places aside for a claim under way; give them back with `unreserve`."""
        free = self.free_places
        self._reserved += free
        return free

    def reserve_for(self, prefix: str) -> int:
        """While the board is cleared: one place for the partition that asked for it, none for others."""
        place = int(prefix == self.clearing_for and not self.closed)
        self._reserved += place
        return place

    def note_clearing(self, prefix: str, is_clearing: bool) -> None:
        """What the last claim of a partition said; the first one that asks is served first."""
        if is_clearing and self.clearing_for is None:
            self.clearing_for = prefix
        elif not is_clearing and self.clearing_for == prefix:
            self.clearing_for = None

    def unreserve(self, places: int) -> None:
        """The claim is answered."""
        self._reserved -= places

    @property
    def free_places(self) -> int:
        """How many jobs may be claimed now, beside the claims under way."""
        return max(0, self._places - len(self._attempts) - self._reserved) if self.has_room else 0

    @property
    def has_room(self) -> bool:
        """Whether a new job is welcome."""
        if self.clearing_for is not None and self._attempts:
            return False
        if self.closed or self.num_stalled > self._lookahead or len(self._attempts) >= self._places:
            return False
        return not any(attempt.rides_alone for attempt in self)

    @property
    def carries_suspect(self) -> bool:
        """At most one suspect rides with a worker."""
        return any(attempt.is_suspect for attempt in self)

    def by_prefix(self) -> dict[str, list[Attempt]]:
        """Attempts by partition."""
        groups: dict[str, list[Attempt]] = defaultdict(list)
        for attempt in self:
            groups[attempt.prefix].append(attempt)
        return groups
