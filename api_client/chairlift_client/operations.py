"""The operations of the protocol as typed calls; what each does stands in functions/*.lua."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

from chairlift_client.calls import Argument, Call
from chairlift_client.protocol import JobClass, JobState

EmitAnswer: TypeAlias = Literal["ok", "dup", "lost", "gap"]
FinishAnswer: TypeAlias = Literal["ok", "dup", "lost", "gap"]
FailAnswer: TypeAlias = Literal["ok", "dead", "dup", "lost"]
HandBackAnswer: TypeAlias = Literal["ok", "cancelled", "dup", "lost"]
CancelAnswer: TypeAlias = Literal["ok", "asked", "ended", "absent"]


class Submission(NamedTuple):
    """Everything that submit stores of a job beside its body. Times are relative ms but `run_at_ms`."""

    job_id: str
    body: bytes
    version: int
    job_class: JobClass
    tenant: str
    cost: int
    seed: int
    deadline_ms: int = 0
    delay_ms: int = 0
    run_at_ms: int = 0
    queue_ttl_ms: int = 86_400_000
    result_ttl_ms: int = 3_600_000
    idempotency: str = ""
    body_hash: str = ""
    prompt_tokens: int = 0
    output_tokens: int = 0
    allow_unknown: bool = False


class SubmitReply(NamedTuple):
    """`kind` ok and dup carry job_id; full and too_long carry what, have and limit; full also retry_ms."""

    kind: Literal["ok", "dup", "conflict", "full", "unknown", "too_long"]
    job_id: str = ""
    what: str = ""
    have: int = 0
    limit: int = 0
    retry_ms: int = 0


def submit(prefix: str, job: Submission) -> Call[SubmitReply]:
    """Put a job in line."""
    arguments = (
        job.job_id, job.version, job.job_class, job.tenant, len(job.body), job.cost, job.seed,
        job.deadline_ms, job.delay_ms, job.run_at_ms, job.queue_ttl_ms, job.result_ttl_ms,
        job.idempotency, job.body_hash, job.prompt_tokens, job.output_tokens, int(job.allow_unknown), job.body,
    )  # fmt: skip
    return Call("submit", prefix, arguments, _submit_reply)


def _submit_reply(reply: list[Any]) -> SubmitReply:
    kind = reply[0].decode()
    if kind in ("ok", "dup", "conflict"):
        return SubmitReply(kind, job_id=reply[1].decode())
    if kind == "full":
        return SubmitReply(kind, what=reply[1].decode(), have=reply[2], limit=reply[3], retry_ms=reply[4])
    if kind == "too_long":
        return SubmitReply(kind, what=reply[1].decode(), have=reply[2], limit=reply[3])
    return SubmitReply(kind)


def find(prefix: str, idempotency: str, body_hash: str) -> Call[SubmitReply | None]:
    """The job that an idempotency key stands for on this partition."""
    return Call(
        "find", prefix, (idempotency, body_hash), lambda reply: _submit_reply(reply) if reply else None
    )


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


class ClaimReply(NamedTuple):
    """`next_due_ms`: until the next delayed or expiring job, -1 for none. `cancels`: (job id, epoch)."""

    now_ms: int
    next_due_ms: int
    last_wake: str
    cancels: tuple[tuple[str, int], ...]
    jobs: tuple[ClaimedJob, ...]


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
    now_ms, next_due_ms, last_wake, cancels, jobs = reply
    return ClaimReply(
        now_ms,
        next_due_ms,
        last_wake.decode(),
        tuple(map(_id_epoch, cancels)),
        tuple(map(_claimed_job, jobs)),
    )


def _id_epoch(line: bytes) -> tuple[str, int]:
    job_id, epoch = line.decode().rsplit(" ", 1)
    return job_id, int(epoch)


def _claimed_job(fields: list[Any]) -> ClaimedJob:
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
    return Call("emit", prefix, tuple(arguments), _words)


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


class ReapReply(NamedTuple):
    """Counts of one sweep; `quiet` while the server is believed to have been away."""

    quiet: bool
    moved: int = 0
    buried: int = 0
    cancelled: int = 0


def reap(
    prefix: str, *, lease_ms: int, max_losses: int, dead_ttl_ms: int, dead_count: int
) -> Call[ReapReply]:
    """Take expired leases away from whoever held them."""
    return Call(
        "reap",
        prefix,
        (lease_ms, max_losses, dead_ttl_ms, dead_count),
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
    return Call("finish", prefix, arguments, _word)


class RetryPolicy(NamedTuple):
    """When a failed attempt is tried again, and when it becomes a dead letter."""

    max_failures: int = 3
    max_losses: int = 3
    first_backoff_ms: int = 500
    max_backoff_ms: int = 60_000
    dead_ttl_ms: int = 14 * 86_400_000
    dead_count: int = 10_000


def fail(
    prefix: str, worker: str, job_id: str, epoch: int, *, reason: str, jitter: float, policy: RetryPolicy
) -> Call[FailAnswer]:
    """An attempt went wrong in a living process: later again, or a dead letter."""
    arguments = (
        worker, job_id, epoch, reason, policy.max_failures, policy.first_backoff_ms, policy.max_backoff_ms,
        jitter, policy.dead_ttl_ms, policy.dead_count,
    )  # fmt: skip
    return Call("fail", prefix, arguments, _word)


def hand_back(
    prefix: str, worker: str, max_losses: int, attempts: Sequence[tuple[str, int]]
) -> Call[tuple[HandBackAnswer, ...]]:
    """Give attempts up unspent: another worker goes on with them."""
    arguments: list[Argument] = [worker, max_losses]
    for attempt in attempts:
        arguments.extend(attempt)
    return Call("hand_back", prefix, tuple(arguments), _words)


def cancel(prefix: str, job_id: str) -> Call[CancelAnswer]:
    """End a job that waits; ask the worker of one that runs."""
    return Call("cancel", prefix, (job_id,), _word)


def forget(prefix: str, job_id: str) -> Call[CancelAnswer]:
    """Erase prompt, log and result; a live job is cancelled first."""
    return Call("forget", prefix, (job_id,), _word)


class StatusReply(NamedTuple):
    """Times in server ms, 0 for not yet. `position` 1 is next, 0 not waiting; `eta_ms` -1 unknown."""

    now_ms: int
    state: JobState
    job_class: JobClass
    tenant: str
    submitted_ms: int
    boarded_ms: int
    finished_ms: int
    epoch: int
    losses: int
    failures: int
    seq: int
    num_tokens: int
    deadline_ms: int
    due_ms: int
    owner: str
    position: int
    eta_ms: int
    result: bytes


def status(prefix: str, job_id: str) -> Call[StatusReply | None]:
    """What is known of a job; None when it is not there."""
    return Call("status", prefix, (job_id,), _status_reply)


def _status_reply(reply: list[Any]) -> StatusReply | None:
    if not reply:
        return None
    texts = {1, 2, 3, 14}
    return StatusReply(*(value.decode() if index in texts else value for index, value in enumerate(reply)))


class ListedJob(NamedTuple):
    """A row of the list of jobs."""

    job_id: str
    state: JobState
    job_class: JobClass
    tenant: str
    submitted_ms: int


def jobs(prefix: str, offset: int, count: int) -> Call[tuple[ListedJob, ...]]:
    """Jobs of one partition, newest first."""
    return Call(
        "jobs",
        prefix,
        (offset, count),
        lambda reply: tuple(map(_listed_job, reply)),
    )


def _listed_job(row: list[Any]) -> ListedJob:
    return ListedJob(row[0].decode(), row[1].decode(), row[2].decode(), row[3].decode(), row[4])


class Counts(NamedTuple):
    """Counters of a partition; `head_age_ms` by class, for classes that have waiting jobs."""

    now_ms: int
    counters: dict[str, float]
    head_age_ms: dict[str, int]


def counts(prefix: str) -> Call[Counts]:
    """The partition's counters."""
    return Call("counts", prefix, (), _counts)


def _counts(reply: list[Any]) -> Counts:
    now_ms, counters, ages = reply
    return Counts(
        now_ms,
        {key.decode(): float(value) for key, value in zip(counters[::2], counters[1::2], strict=True)},
        {key.decode(): value for key, value in zip(ages[::2], ages[1::2], strict=True)},
    )


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
    heartbeat: dict[str, str | int | float],
) -> Call[Announcement]:
    """A worker's heartbeat: what model it serves, and how it is."""
    arguments: list[Argument] = [worker, ttl_ms, model, fingerprint, partitions, context_tokens, pool_tokens]
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
    return Call("open", prefix, (context_tokens, pool_tokens, max_waiting, max_bytes, max_tenant_jobs), _word)


def dead_list(
    prefix: str, after: str = "-", count: int = 100
) -> Call[tuple[tuple[str, dict[str, bytes]], ...]]:
    """Dead letters, oldest first: (letter id, fields)."""
    return Call("dead_list", prefix, (after, count), _letters)


def _letters(reply: list[Any]) -> tuple[tuple[str, dict[str, bytes]], ...]:
    return tuple(
        (letter.decode(), {k.decode(): v for k, v in zip(fields[::2], fields[1::2], strict=True)})
        for letter, fields in reply
    )


def dead_drop(prefix: str, letter: str) -> Call[int]:
    """Remove a dead letter."""
    return Call("dead_drop", prefix, (letter,), int)


def dead_retry(
    prefix: str, letter: str, *, queue_ttl_ms: int, result_ttl_ms: int
) -> Call[Literal["ok", "absent", "live"]]:
    """Give a dead letter a new life under its id."""
    return Call("dead_retry", prefix, (letter, queue_ttl_ms, result_ttl_ms), _word)


def _word(reply: bytes) -> Any:
    return reply.decode()


def _words(reply: list[bytes]) -> Any:
    return tuple(word.decode() for word in reply)
