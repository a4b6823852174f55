"""Every error that Chairlift raises on purpose, as one tree.

ChairliftError
├── InvalidJob                 the request itself is wrong; sending it again cannot help
│   └── JobTooLarge            a size over a limit, with both numbers
├── UnknownModel               no worker has ever announced this model
├── QueueFull                  the queue is at its limit; carries `retry_after_s`
├── IdempotencyConflict        this key already stands for a job with another body
├── JobError                   about one job; carries `job_id`
│   ├── JobExpired             no such job (any more): its keys have run out, or it never was
│   ├── JobFailed              it ended without a result; carries `code`
│   ├── JobCancelled           somebody cancelled it
│   ├── LogRewound             the server lost events that were already delivered
│   └── ResultTimeout          not finished within the caller's `timeout`
├── ServerUnsupported          the Redis server is too old, or set up in a way that loses jobs
├── ServerUnavailable          no answer from Redis within the retry time
├── ConfigError                a setting is unknown or out of range
└── ModelError                 a model cannot be loaded or is not supported
"""

from __future__ import annotations


class ChairliftError(Exception):
    """Base of everything below."""


class InvalidJob(ChairliftError):
    """The request is wrong in itself; the message names the field and the numbers."""


class JobTooLarge(InvalidJob):
    """A size is over its limit; the message carries both numbers."""


class UnknownModel(ChairliftError):
    """No worker has announced this model in this namespace."""


class QueueFull(ChairliftError):
    """The queue is at its depth or byte limit.

    `retry_after_s` is an estimate from the measured service rate of this queue.
    """

    def __init__(self, message: str, *, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class IdempotencyConflict(ChairliftError):
    """The idempotency key already stands for a job with another body."""

    def __init__(self, message: str, *, job_id: str) -> None:
        super().__init__(message)
        self.job_id = job_id


class JobError(ChairliftError):
    """About one job."""

    def __init__(self, message: str, *, job_id: str) -> None:
        super().__init__(message)
        self.job_id = job_id


class JobExpired(JobError):
    """No such job: its keys have run out, or it never was."""


class JobFailed(JobError):
    """The job ended without a result. `code` is one of `protocol.FailureCode`."""

    def __init__(self, message: str, *, job_id: str, code: str) -> None:
        super().__init__(message, job_id=job_id)
        self.code = code


class JobCancelled(JobError):
    """Somebody cancelled the job."""


class LogRewound(JobError):
    """The server lost events (a failover) and the job regenerated other tokens than those delivered."""


class ResultTimeout(JobError):
    """The job did not end within the caller's timeout; it goes on."""


class ServerUnsupported(ChairliftError):
    """The Redis server is too old, or configured in a way that loses jobs."""


class ServerUnavailable(ChairliftError):
    """Redis did not answer within the retry time."""


class ConfigError(ChairliftError):
    """A setting is unknown or out of range."""


class ModelError(ChairliftError):
    """A model cannot be loaded, or its architecture is not supported."""
