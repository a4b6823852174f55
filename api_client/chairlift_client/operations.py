"""What producers, subscribers and operators ask of a partition; functions/*.lua say what each does."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, TypeAlias

from chairlift_client.calls import Call, word
from chairlift_client.protocol import JobClass, JobState

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
    """`kind` ok and dup carry job_id; full and too_long carry what, have and limit; full also retry_ms;
    invalid carries what, the name of the argument, and value."""

    kind: Literal["ok", "dup", "conflict", "full", "unknown", "too_long", "invalid"]
    job_id: str = ""
    what: str = ""
    have: int = 0
    limit: int = 0
    retry_ms: int = 0
    value: str = ""


def submit(prefix: str, job: Submission) -> Call[SubmitReply]:
    """Put a job in line."""
    arguments = (
        job.job_id, job.version, job.job_class, job.tenant, len(job.body), job.cost, job.seed,
        job.deadline_ms, job.delay_ms, job.run_at_ms, job.queue_ttl_ms, job.result_ttl_ms,
        job.idempotency, job.body_hash, job.prompt_tokens, job.output_tokens,
        int(job.allow_unknown), job.body,
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
    if kind == "invalid":
        return SubmitReply(kind, what=reply[1].decode(), value=reply[2].decode(errors="replace"))
    return SubmitReply(kind)


def find(prefix: str, idempotency: str, body_hash: str) -> Call[SubmitReply | None]:
    """The job that an idempotency key stands for on this partition."""
    return Call(
        "find", prefix, (idempotency, body_hash), lambda reply: _submit_reply(reply) if reply else None
    )


def cancel(prefix: str, job_id: str) -> Call[CancelAnswer]:
    """End a job that waits; ask the worker of one that runs."""
    return Call("cancel", prefix, (job_id,), word)


def forget(prefix: str, job_id: str) -> Call[CancelAnswer]:
    """Erase prompt, log and result; a live job is cancelled first."""
    return Call("forget", prefix, (job_id,), word)


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


Letter: TypeAlias = Mapping[str, bytes]
"""The fields of a dead letter: `id` of the job, `reason`, `body`, `class`, `tenant`, counters and times."""


def dead_list(prefix: str, after: str = "-", count: int = 100) -> Call[tuple[tuple[str, Letter], ...]]:
    """Dead letters, oldest first: (letter id, fields). Their bodies are left empty."""
    return Call("dead_list", prefix, (after, count), _letters)


def _letters(reply: list[Any]) -> tuple[tuple[str, Letter], ...]:
    return tuple((letter.decode(), _letter(fields)) for letter, fields in reply)


def dead_read(prefix: str, letter: str) -> Call[Letter]:
    """One dead letter with its body; empty where it is not there."""
    return Call("dead_read", prefix, (letter,), _letter)


def _letter(fields: list[bytes]) -> Letter:
    return {name.decode(): value for name, value in zip(fields[::2], fields[1::2], strict=True)}


def dead_drop(prefix: str, letter: str) -> Call[int]:
    """Remove a dead letter."""
    return Call("dead_drop", prefix, (letter,), int)


def dead_retry(
    prefix: str, letter: str, *, queue_ttl_ms: int, result_ttl_ms: int
) -> Call[Literal["ok", "dup", "absent", "live"]]:
    """Give a dead letter a new life under its id; `live` where that job was begun anew already."""
    return Call("dead_retry", prefix, (letter, queue_ttl_ms, result_ttl_ms), word)
