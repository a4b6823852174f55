"""What can be seen of jobs, models and workers from outside, as plain data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msgspec import Struct

from chairlift_client.operations import Counts, StatusReply
from chairlift_client.protocol import JobClass, JobState, ModelInfo


class JobStatus(Struct, frozen=True, kw_only=True):
    """Where a job stands. Times are ms since the epoch by the server's clock, 0 for not yet (or not set).

    `position` 1 is next in its line and 0 is not waiting; `eta_s` is an estimate from the measured service
    rate. `attempts` counts how often a worker took it, `failures` the attempts that failed, `losses` those
    in a row whose worker was lost without a new token.
    """

    job_id: str
    state: JobState
    job_class: JobClass
    tenant: str
    position: int
    eta_s: float | None
    attempts: int
    failures: int
    losses: int
    output_tokens: int
    worker: str
    submitted_ms: int
    boarded_ms: int
    finished_ms: int
    deadline_ms: int
    due_ms: int


class ModelStatus(Struct, frozen=True, kw_only=True):
    """The queue of a model, over all partitions."""

    model: str
    info: ModelInfo
    waiting: int
    delayed: int
    running: int
    finished: int
    failed: int
    cancelled: int
    oldest_waiting_s: float


class WorkerStatus(Struct, frozen=True, kw_only=True):
    """A worker with a heartbeat, and what it said of itself in the last one."""

    worker_id: str
    model: str
    fields: dict[str, str]


def job_status(job_id: str, reply: StatusReply) -> JobStatus:
    """From the server's answer."""
    return JobStatus(
        job_id=job_id,
        state=reply.state,
        job_class=reply.job_class,
        tenant=reply.tenant,
        position=reply.position,
        eta_s=None if reply.eta_ms < 0 else reply.eta_ms / 1000,
        attempts=reply.epoch,
        failures=reply.failures,
        losses=reply.losses,
        output_tokens=reply.num_tokens,
        worker=reply.owner,
        submitted_ms=reply.submitted_ms,
        boarded_ms=reply.boarded_ms,
        finished_ms=reply.finished_ms,
        deadline_ms=reply.deadline_ms,
        due_ms=reply.due_ms,
    )


def model_status(model: str, info: ModelInfo, partitions: Sequence[Counts]) -> ModelStatus:
    """The sum of the partitions' counters."""

    def total(counter: str) -> int:
        return int(sum(partition.counters.get(counter, 0) for partition in partitions))

    ages_ms = [age for partition in partitions for age in partition.head_age_ms.values()]
    return ModelStatus(
        model=model,
        info=info,
        waiting=total("waiting"),
        delayed=total("delayed"),
        running=total("running"),
        finished=total("ended:finished"),
        failed=total("ended:failed"),
        cancelled=total("ended:cancelled"),
        oldest_waiting_s=max(ages_ms, default=0) / 1000,
    )


def worker_status(worker_id: str, fields: Mapping[bytes, bytes]) -> WorkerStatus:
    """From the hash of a heartbeat."""
    texts = {key.decode(): value.decode(errors="replace") for key, value in fields.items()}
    return WorkerStatus(worker_id=worker_id, model=texts.pop("model", ""), fields=texts)
