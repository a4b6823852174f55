"""Chairlift for producers and subscribers: jobs into Redis, tokens out. Needs nothing but msgspec and redis.

from chairlift_client import Client, SamplingParams

async with Client("redis://localhost") as client:
    result = await client.generate(
        model="smollm2",
        messages=[{"role": "user", "content": "Why is the sky blue?"}],
        sampling=SamplingParams(max_tokens=100, temperature=0.7),
    )
    print(result.text)
"""

import logging

from chairlift_client.client import Client, Job
from chairlift_client.dead_letters import DeadLetter
from chairlift_client.errors import (
    ChairliftError,
    ConfigError,
    IdempotencyConflict,
    InvalidJob,
    JobCancelled,
    JobError,
    JobExpired,
    JobFailed,
    JobTooLarge,
    LogRewound,
    ModelError,
    QueueFull,
    ResultTimeout,
    ServerUnavailable,
    ServerUnsupported,
    UnknownModel,
)
from chairlift_client.operations import ListedJob
from chairlift_client.protocol import (
    Cancelled,
    Choice,
    ChoiceDelta,
    Event,
    Failed,
    Finished,
    JobClass,
    JobResult,
    JobState,
    Limits,
    Message,
    ModelInfo,
    Queued,
    Resumed,
    SamplingParams,
    Started,
    Timings,
    TokenLogprobs,
    Tokens,
    Usage,
)
from chairlift_client.request import JobOptions
from chairlift_client.sampling import Grammar, JsonSchema, OneOf, Regex
from chairlift_client.status import JobStatus, ModelStatus, WorkerStatus
from chairlift_client.sync import SyncClient, SyncJob

logging.getLogger(__name__).addHandler(logging.NullHandler())  # what is shown is the program's decision

__all__ = [
    "Cancelled",
    "ChairliftError",
    "Choice",
    "ChoiceDelta",
    "Client",
    "ConfigError",
    "DeadLetter",
    "Event",
    "Failed",
    "Finished",
    "Grammar",
    "IdempotencyConflict",
    "InvalidJob",
    "Job",
    "JobCancelled",
    "JobClass",
    "JobError",
    "JobExpired",
    "JobFailed",
    "JobOptions",
    "JobResult",
    "JobState",
    "JobStatus",
    "JobTooLarge",
    "JsonSchema",
    "Limits",
    "ListedJob",
    "LogRewound",
    "Message",
    "ModelError",
    "ModelInfo",
    "ModelStatus",
    "OneOf",
    "QueueFull",
    "Queued",
    "Regex",
    "ResultTimeout",
    "Resumed",
    "SamplingParams",
    "ServerUnavailable",
    "ServerUnsupported",
    "Started",
    "SyncClient",
    "SyncJob",
    "Timings",
    "TokenLogprobs",
    "Tokens",
    "UnknownModel",
    "Usage",
    "WorkerStatus",
]
