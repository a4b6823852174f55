"""What a worker asks of a partition, and of its namespace; what each does stands in functions/*.lua."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

from chairlift_client.calls import Argument, Call, word, words
from chairlift_client.protocol import JobClass, JobState

EmitAnswer: TypeAlias = Literal["ok", "dup", "lost", "gap"]
FinishAnswer: TypeAlias = Literal["ok", "dup", "lost", "gap"]
FailAnswer: TypeAlias = Literal["ok", "dead", "cancelled", "dup", "lost"]
HandBackAnswer: TypeAlias = Literal["ok", "dead", "cancelled", "dup", "lost"]


class ClaimedJob(NamedTuple):
    """A job that is now this worker's, with its log so far. `losses` counts this attempt already."""

    job_id: str
    epoch: int
    seq: int
    losses: int
    failures: int
    alone: bool
    seed: int
    deadline_ms: int
    submitted_ms: int
    boarded_ms: int
    job_class: JobClass
    tenant: str
    body: bytes
    log: tuple[bytes, ...]


class UnreadableJob(NamedTuple):
    """A job that is now this worker's, in whose fields stands what the protocol does not permit."""

    job_id: str
    epoch: int
    seq: int
    reason: str


class ClaimReply(NamedTuple):
    """`next_due_ms`: until the next delayed or expiring job, -1 for none. `cancels`: (job id, epoch).

    `clearing`: this worker is to become empty, since a job here has to ride alone.
    """

    now_ms: int
    next_due_ms: int
    last_wake: str
    cancels: tuple[tuple[str, int], ...]
    jobs: tuple[ClaimedJob, ...]
    clearing: bool = False
    unreadable: tuple[UnreadableJob, ...] = ()


def claim(
    prefix: str,
    worker: str,
    number: int,
    capacity: int,
    *,
    lease_ms: int,
    version: int,
    on_board: int,
    carries_suspect: bool,
) -> Call[ClaimReply]:
    """Take up to `capacity` jobs, and hear what is cancelled; a repeated `number` is answered the same."""
    arguments = (worker, number, capacity, lease_ms, version, on_board, int(carries_suspect))
    return Call("claim", prefix, arguments, _claim_reply)


def _claim_reply(reply: list[Any]) -> ClaimReply:
    now_ms, next_due_ms, last_wake, cancels, rows, clearing = reply
    jobs = tuple(map(_claimed_job, rows))
    return ClaimReply(
        now_ms,
        next_due_ms,
        last_wake.decode(),
        tuple(map(_id_epoch, cancels)),
        tuple(job for job in jobs if isinstance(job, ClaimedJob)),
        bool(clearing),
        tuple(job for job in jobs if isinstance(job, UnreadableJob)),
    )


def _id_epoch(line: bytes) -> tuple[str, int]:
    job_id, epoch = line.decode().rsplit(" ", 1)
    return job_id, int(epoch)


def _claimed_job(row: list[Any]) -> ClaimedJob | UnreadableJob:
    try:
        return _read_row(row)
    except ValueError as error:
        job_id, epoch, seq = (*row, 0)[:3]  # the server cuts a row off at the first number that is none
        return UnreadableJob(job_id.decode(), epoch, seq, f"a field of the job cannot be read: {error}")


def _read_row(fields: list[Any]) -> ClaimedJob:
    (
        job_id,
        epoch,
        seq,
        losses,
        failures,
        alone,
        seed,
        deadline,
        submitted,
        boarded,
        job_class,
        tenant,
        body,
        log,
    ) = fields
    return ClaimedJob(
        job_id.decode(), epoch, seq, losses, failures, bool(alone), int(seed), deadline, submitted, boarded,
        job_class.decode(), tenant.decode(), body, tuple(log),
    )  # fmt: skip


class Emission(NamedTuple):
    """One event to log and publish."""

    job_id: str
    epoch: int
    seq: int
    num_tokens: int
    event: bytes


def emit(prefix: str, worker: str, emissions: Sequence[Emission]) -> Call[tuple[EmitAnswer, ...]]:
    """Log and publish events, each behind the fence; one answer for each."""
    arguments: list[Argument] = [worker]
    for emission in emissions:
        arguments.extend(emission)
    return Call("emit", prefix, tuple(arguments), words)


class RenewReply(NamedTuple):
    """`lost`: no longer this worker's. `cancelled`: (job id, epoch)."""

    lost: tuple[str, ...]
    cancelled: tuple[tuple[str, int], ...]


def renew(prefix: str, worker: str, lease_ms: int, attempts: Sequence[tuple[str, int]]) -> Call[RenewReply]:
    """Renew the leases of (job id, epoch) attempts."""
    arguments: list[Argument] = [worker, lease_ms]
    for attempt in attempts:
        arguments.extend(attempt)
    return Call(
        "renew",
        prefix,
        tuple(arguments),
        lambda reply: RenewReply(tuple(i.decode() for i in reply[0]), tuple(map(_id_epoch, reply[1]))),
    )


class RetryPolicy(NamedTuple):
    """When a failed attempt is tried again, and when it becomes a dead letter."""

    max_failures: int = 3
    max_losses: int = 3
    first_backoff_ms: int = 500
    max_backoff_ms: int = 60_000
    dead_ttl_ms: int = 14 * 86_400_000
    dead_count: int = 10_000


class ReapReply(NamedTuple):
    """Counts of one sweep; `quiet` while the server is believed to have been away.

    `mended`: jobs whose place was gone (somebody deleted a stream) and that have one again.
    """

    quiet: bool
    moved: int = 0
    buried: int = 0
    cancelled: int = 0
    mended: int = 0


def reap(prefix: str, *, lease_ms: int, policy: RetryPolicy) -> Call[ReapReply]:
    """Take expired leases away from whoever held them."""
    return Call(
        "reap",
        prefix,
        (lease_ms, policy.max_losses, policy.dead_ttl_ms, policy.dead_count),
        lambda reply: ReapReply(True) if len(reply) == 1 else ReapReply(False, *reply),
    )


def tidy(prefix: str, *, lease_ms: int, dead_ttl_ms: int) -> Call[int]:
    """Remove idle consumers for which nothing is pending, and old dead letters."""
    return Call("tidy", prefix, (lease_ms, dead_ttl_ms), int)


def finish(
    prefix: str,
    worker: str,
    job_id: str,
    epoch: int,
    *,
    seq: int,
    state: JobState,
    event: bytes,
    result: bytes,
    tokens: int,
) -> Call[FinishAnswer]:
    """End a job with its terminal event and its result."""
    arguments = (worker, job_id, epoch, seq, state, event, result, tokens)
    return Call("finish", prefix, arguments, word)


def fail(
    prefix: str, worker: str, job_id: str, epoch: int, *, reason: str, jitter: float, policy: RetryPolicy
) -> Call[FailAnswer]:
    """An attempt went wrong in a living process: later again, or a dead letter, or cancelled."""
    arguments = (
        worker, job_id, epoch, reason, policy.max_failures, policy.first_backoff_ms, policy.max_backoff_ms,
        jitter, policy.dead_ttl_ms, policy.dead_count,
    )  # fmt: skip
    return Call("fail", prefix, arguments, word)


def hand_back(
    prefix: str, worker: str, attempts: Sequence[tuple[str, int]], *, policy: RetryPolicy, spent: bool = False
) -> Call[tuple[HandBackAnswer, ...]]:
    """Give (job id, epoch) attempts up: another worker goes on with them.

    Unspent in a drain; `spent` when the engine broke down under them, which makes each a suspect.
    """
    arguments: list[Argument] = [
        worker,
        policy.max_losses,
        int(spent),
        policy.dead_ttl_ms,
        policy.dead_count,
    ]
    for attempt in attempts:
        arguments.extend(attempt)
    return Call("hand_back", prefix, tuple(arguments), words)


class Announcement(NamedTuple):
    """`fingerprint` is set when another one is alive under this name; `partitions` is what holds."""

    fingerprint: str | None
    partitions: int


def announce(
    shared: str,
    worker: str,
    ttl_ms: int,
    model: str,
    fingerprint: str,
    *,
    partitions: int,
    context_tokens: int,
    pool_tokens: int,
    adapters: bool = False,
    heartbeat: dict[str, str | int | float],
) -> Call[Announcement]:
    """A worker's heartbeat: what model it serves, and how it is."""
    arguments: list[Argument] = [worker, ttl_ms, model, fingerprint, partitions, context_tokens, pool_tokens]
    arguments.append(int(adapters))
    for field, value in (heartbeat or {"pid": 0}).items():
        arguments.extend((field, value))
    return Call("announce", shared, tuple(arguments), _announcement)


def _announcement(reply: list[Any]) -> Announcement:
    if reply[0] == b"ok":
        return Announcement(None, reply[1])
    return Announcement(reply[1].decode(), 0)


def depart(shared: str, worker: str) -> Call[int]:
    """A worker's orderly end."""
    return Call("depart", shared, (worker,), int)


def open_partition(
    prefix: str,
    *,
    context_tokens: int,
    pool_tokens: int,
    max_waiting: int,
    max_bytes: int,
    max_tenant_jobs: int,
) -> Call[str]:
    """What submit checks on this partition; 0 means no limit."""
    return Call("open", prefix, (context_tokens, pool_tokens, max_waiting, max_bytes, max_tenant_jobs), word)
