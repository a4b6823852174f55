"""The way of checked jobs into their queues: which partition, one pipeline per shard, answers to errors."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from time import monotonic
from typing import NamedTuple

from redis.exceptions import OutOfMemoryError, RedisError

from chairlift_client import calls, keys, operations
from chairlift_client.calls import Call
from chairlift_client.connection import Shard, Shards
from chairlift_client.errors import (
    ChairliftError,
    IdempotencyConflict,
    InvalidJob,
    JobTooLarge,
    QueueFull,
    UnknownModel,
)
from chairlift_client.operations import SubmitReply
from chairlift_client.protocol import ModelInfo, decode_model
from chairlift_client.request import CheckedJob

MODEL_CACHE_S = 5.0
CHUNK_JOBS = 256
OOM_RETRY_S = 5.0


class _Placed(NamedTuple):
    """A job with its id, ready to be sent."""

    place: int
    model: str
    call: Call[SubmitReply]


class Door:
    """Puts jobs in line, and knows the models (for a few seconds)."""

    def __init__(self, shards: Shards, namespace: str) -> None:
        self._shards = shards
        self._namespace = namespace
        self._models: dict[str, tuple[ModelInfo, float]] = {}

    async def submit(self, jobs: Sequence[CheckedJob]) -> list[str | ChairliftError]:
        """For each job its id, or why it was refused. Raises only what concerns all of them."""
        outcomes: dict[int, str | ChairliftError] = {}
        to_send: list[_Placed] = []
        for index, job in enumerate(jobs):
            placed = await self._place(index, job)
            if isinstance(placed, _Placed):
                to_send.append(placed)
            else:
                outcomes[index] = placed
        for chunk in self._by_shard(to_send):
            for placed, reply in zip(chunk, await self._send(chunk), strict=True):
                outcomes[placed.place] = _outcome(reply, placed.model)
        return [outcomes[index] for index in range(len(jobs))]

    async def model(self, name: str, *, fresh: bool = False) -> ModelInfo | None:
        """What workers announced of a model, at most some seconds old; None for an unknown one."""
        known = self._models.get(name)
        if known is not None and not fresh and monotonic() < known[1]:
            return known[0]
        key = keys.models(self._namespace)
        packed = await self._shards.call(key, lambda shard: shard.redis.execute_command("HGET", key, name))
        if packed is None:
            self._models.pop(name, None)
            return None
        info = decode_model(packed)
        self._models[name] = (info, monotonic() + MODEL_CACHE_S)
        return info

    async def _place(self, index: int, job: CheckedJob) -> _Placed | str | ChairliftError:
        """Draws the id; an idempotency key is first looked up where it stood before the last growth."""
        # A key must meet its twin on one partition, so that their number has to be the true one.
        info = await self.model(job.model, fresh=job.idempotency_key is not None)
        if info is None:
            if not job.allow_unknown_model:
                return _unknown(job.model)
            info = ModelInfo(fingerprint="")
        if job.body.adapter is not None and info.fingerprint and not info.adapters:
            # They may have begun to serve adapters since it was looked up.
            info = await self.model(job.model, fresh=True) or info
            if not info.adapters:
                return InvalidJob(f"{job.model!r} is served without adapters; asked for {job.body.adapter!r}")
        earlier = await self._find_earlier(job, info)
        if earlier is not None:
            return _outcome(earlier, job.model)
        job_id = keys.draw_job_id(
            job.model, info.partitions, tenant=job.tenant, idempotency_key=job.idempotency_key
        )
        prefix = keys.prefix(self._namespace, job.model, job_id.partition)
        # The model is known here; a worker that has just announced it may not have opened this partition yet.
        submission = job.submission(str(job_id))._replace(allow_unknown=True)
        return _Placed(index, job.model, operations.submit(prefix, submission))

    async def _find_earlier(self, job: CheckedJob, info: ModelInfo) -> SubmitReply | None:
        if job.idempotency_key is None or not info.previous_partitions:
            return None
        twin = keys.draw_job_id(
            job.model, info.previous_partitions, tenant=job.tenant, idempotency_key=job.idempotency_key
        )
        prefix = keys.prefix(self._namespace, job.model, twin.partition)
        return await self._shards.run(operations.find(prefix, job.idempotency, job.body_hash))

    def _by_shard(self, placed: Iterable[_Placed]) -> Iterable[list[_Placed]]:
        groups: dict[Shard, list[_Placed]] = defaultdict(list)
        for job in placed:
            groups[self._shards.shard_of(job.call.prefix)].append(job)
        for group in groups.values():
            for start in range(0, len(group), CHUNK_JOBS):
                yield group[start : start + CHUNK_JOBS]

    async def _send(self, chunk: Sequence[_Placed]) -> list[SubmitReply]:
        """One pipeline; what went wrong for single jobs of it is sent again by itself, as is safe to do."""
        many = [job.call for job in chunk]
        if len(many) == 1:
            return [await self._send_one(many[0])]
        replies = await self._shards.call(many[0].prefix, lambda shard: calls.run_many(shard.redis, many))
        return [
            await self._send_one(call) if isinstance(reply, RedisError) else reply
            for call, reply in zip(many, replies, strict=True)
        ]

    async def _send_one(self, call: Call[SubmitReply]) -> SubmitReply:
        try:
            return await self._shards.run(call)
        except OutOfMemoryError:
            return SubmitReply("full", what="memory of the server", retry_ms=int(OOM_RETRY_S * 1000))


def _outcome(reply: SubmitReply, model: str) -> str | ChairliftError:
    match reply.kind:
        case "ok" | "dup":
            return reply.job_id
        case "conflict":
            return IdempotencyConflict(
                f"the idempotency key stands for job {reply.job_id}, which has another body",
                job_id=reply.job_id,
            )
        case "full":
            numbers = f": {reply.have} with this one, at most {reply.limit}" if reply.limit else ""
            return QueueFull(f"{reply.what}{numbers}", retry_after_s=reply.retry_ms / 1000)
        case "too_long":
            return JobTooLarge(
                f"prompt and output need {reply.have} tokens; the {reply.what} of {model} has {reply.limit}"
            )
        case "unknown":
            return _unknown(model)
        case "invalid":
            return InvalidJob(f"{reply.what} cannot be {reply.value!r}")


def _unknown(model: str) -> UnknownModel:
    return UnknownModel(f"no worker has announced {model!r}; allow_unknown_model submits all the same")
