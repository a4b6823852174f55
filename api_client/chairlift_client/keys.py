"""Every Redis key, group and channel name, and the parts of a job id.

All keys of one partition share one hash tag, so that a Lua function may touch them together,
also in Redis Cluster. The Lua side derives the same names from the prefix (functions/00_common.lua).
"""

from __future__ import annotations

import hashlib
import re
import secrets
import string
from typing import NamedTuple

from chairlift_client.errors import InvalidJob

GROUP = "workers"
DEFAULT_NAMESPACE = "default"
RANDOM_CHARS = 22
MAX_PARTITIONS = 4096

_BASE62 = string.digits + string.ascii_uppercase + string.ascii_lowercase
_NAMESPACE = re.compile(r"[A-Za-z0-9_-]{1,32}")
_MODEL = re.compile(r"[A-Za-z0-9._/-]{1,96}")
_TENANT = re.compile(r"[A-Za-z0-9._-]{1,64}")
_JOB_ID = re.compile(r"([A-Za-z0-9._/-]{1,96})\.([0-9]{1,4})\.([0-9A-Za-z]{22})")


class JobId(NamedTuple):
    """`<model>.<partition>.<22 random base62>`: who has the id knows the shard."""

    model: str
    partition: int
    random: str

    def __str__(self) -> str:
        return f"{self.model}.{self.partition}.{self.random}"


def parse_job_id(text: str) -> JobId:
    """The parts of a job id; InvalidJob if it is none."""
    match = _JOB_ID.fullmatch(text) if isinstance(text, str) else None
    if match is None:
        raise InvalidJob(f"not a job id: {text!r:.150} (expected <model>.<partition>.<22 base62>)")
    return JobId(match[1], int(match[2]), match[3])


def random_base62(length: int = RANDOM_CHARS) -> str:
    """Unguessable characters; 22 of them carry 131 bits."""
    return "".join(secrets.choice(_BASE62) for _ in range(length))


def draw_job_id(
    model: str, partitions: int, *, tenant: str = "", idempotency_key: str | None = None
) -> JobId:
    """A new id. With an idempotency key the partition depends on it, so that a repeat meets the first."""
    random = random_base62()
    source = random if idempotency_key is None else f"{tenant}\0{idempotency_key}"
    return JobId(model, partition_of(source, partitions), random)


def partition_of(source: str, partitions: int) -> int:
    """Where a string belongs: the same for everybody who asks."""
    digest = hashlib.blake2b(source.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") % partitions


def check_namespace(name: str) -> str:
    """The name itself, or InvalidJob."""
    return _check(_NAMESPACE, "namespace", name)


def check_model(name: str) -> str:
    """The name itself, or InvalidJob."""
    return _check(_MODEL, "model", name)


def check_tenant(name: str) -> str:
    """The name itself, or InvalidJob."""
    return _check(_TENANT, "tenant", name)


def _check(pattern: re.Pattern[str], what: str, name: str) -> str:
    if not isinstance(name, str) or pattern.fullmatch(name) is None:
        raise InvalidJob(
            f"{what} name {name!r:.120} ({len(str(name))} characters) does not match {pattern.pattern}"
        )
    return name


def shared(namespace: str) -> str:
    """The prefix of what belongs to no partition: `:models`, `:workers`, `:worker:<id>`.

    A tag of its own, so that one function may touch them together and ACL can isolate a namespace.
    """
    return f"cl:{{{namespace}}}"


def models(namespace: str) -> str:
    """Hash: model name → ModelInfo. Read before any partition is known."""
    return f"{shared(namespace)}:models"


def worker(namespace: str, worker_id: str) -> str:
    """Hash with an expiry: a worker's heartbeat."""
    return f"{shared(namespace)}:worker:{worker_id}"


def workers(namespace: str) -> str:
    """Sorted set: worker id → until when its last heartbeat counts (ms)."""
    return f"{shared(namespace)}:workers"


def prefix(namespace: str, model: str, partition: int) -> str:
    """The hash tag that every key of one partition begins with."""
    return f"cl:{{{namespace}/{model}/{partition}}}"


def job(prefix: str, job_id: str) -> str:
    """Hash: the job."""
    return f"{prefix}:job:{job_id}"


def events(prefix: str, job_id: str) -> str:
    """Stream: the event log; entry `<seq>-0` holds the event in field `e`."""
    return f"{prefix}:ev:{job_id}"


def channel(prefix: str, job_id: str) -> str:
    """Sharded pub/sub channel: live events."""
    return f"{prefix}:ch:{job_id}"


def wake(prefix: str) -> str:
    """Stream: an entry whenever there is something for an idle worker."""
    return f"{prefix}:wake"


def dead(prefix: str) -> str:
    """Stream: dead letters."""
    return f"{prefix}:dead"
