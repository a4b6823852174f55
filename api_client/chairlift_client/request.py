"""What a producer may say of a job, and its way from there to what the server takes."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, NamedTuple, Required, TypedDict

from msgspec.structs import replace

from chairlift_client import keys
from chairlift_client.body_checks import check_body
from chairlift_client.checks import MAX_SEED, check_bool, check_float, check_size, check_text
from chairlift_client.errors import InvalidJob
from chairlift_client.operations import Submission
from chairlift_client.protocol import (
    JOB_CLASSES,
    SCHEMA_VERSION,
    JobBody,
    JobClass,
    Limits,
    Message,
    SamplingParams,
    Structured,
    encode,
)

MAX_DURATION_S = 366 * 86_400.0
DEFAULT_QUEUE_TTL_S = 86_400.0
DEFAULT_RESULT_TTL_S = 3_600.0
MAX_KEY_CHARS = 512

# For fair shares between tenants, before the true numbers are known.
_BYTES_PER_TOKEN = 4
_EXPECTED_OUTPUT_TOKENS = 256

_BODY_FIELDS = tuple(name for name in JobBody.__struct_fields__ if name != "version")


class JobOptions(TypedDict, total=False):
    """The keyword arguments of `Client.submit` and `generate`, and one item of `submit_many`.

    model: the name workers announce.
    messages, prompt, token_ids: exactly one of them. Messages go through the model's chat template;
        they may be dicts with the fields of Message. A prompt is taken as it is.
    tools: functions that the chat template tells the model about, as dicts of JSON schema.
    chat_template: a Jinja template in place of the model's own, for models that have none.
    sampling: how tokens are chosen and when to stop; None is the default, sampling at temperature 1.
    structured: the form that the text must have: a JsonSchema, Regex, Grammar or OneOf.
    cache: False keeps the job's prompt out of the prefix cache.
    adapter: the name of a LoRA adapter of the model.
    job_class: "high", "normal", "low" or "batch". A lower class is slower but never starves.
    tenant: shares of a queue are fair between tenants.
    deadline_s: from now; a job that has not ended by then fails with code "deadline".
    delay_s, run_at: do not begin before; `run_at` with a time zone. At most one of them.
    idempotency_key: the same key with the same body is the same job, with another body an error.
    queue_ttl_s: a job that no worker has taken by then fails with code "queue_timeout".
    result_ttl_s: how long result and events are kept after the end.
    metadata: strings of the caller's own; they come back with the result.
    traceparent: W3C trace context, for tracing across the queue.
    allow_unknown_model: submit before any worker has announced the model.
    """

    model: Required[str]
    messages: Sequence[Message | Mapping[str, Any]] | None
    prompt: str | None
    token_ids: Sequence[int] | None
    tools: Sequence[Mapping[str, Any]] | None
    chat_template: str | None
    sampling: SamplingParams | Mapping[str, Any] | None
    structured: Structured | Mapping[str, Any] | None
    cache: bool
    adapter: str | None
    job_class: JobClass
    tenant: str
    deadline_s: float | None
    delay_s: float | None
    run_at: datetime | None
    idempotency_key: str | None
    queue_ttl_s: float
    result_ttl_s: float
    metadata: Mapping[str, str] | None
    traceparent: str | None
    allow_unknown_model: bool


class CheckedJob(NamedTuple):
    """A job that is right in itself. Times are in ms, 0 where not given."""

    model: str
    body: JobBody
    encoded: bytes
    job_class: JobClass
    tenant: str
    deadline_ms: int
    delay_ms: int
    run_at_ms: int
    queue_ttl_ms: int
    result_ttl_ms: int
    idempotency_key: str | None
    allow_unknown_model: bool

    @property
    def idempotency(self) -> str:
        """What stands for the key on the server, "" without one."""
        if self.idempotency_key is None:
            return ""
        return _digest(f"{self.tenant}\0{self.idempotency_key}".encode())

    @property
    def body_hash(self) -> str:
        """Equal for equal jobs; the trace of a repeated request is another one each time and left out."""
        return _digest(encode(_without_trace(self.body)))

    def submission(self, job_id: str) -> Submission:
        """As the submit function takes it, under this id."""
        sampling = self.body.sampling
        prompt_tokens = len(self.body.token_ids or ())
        if sampling.truncate_prompt is not None:
            prompt_tokens = min(prompt_tokens, sampling.truncate_prompt)
        expected = prompt_tokens or len(self.encoded) // _BYTES_PER_TOKEN
        each = _EXPECTED_OUTPUT_TOKENS if sampling.max_tokens is None else sampling.max_tokens
        return Submission(
            job_id=job_id,
            body=self.encoded,
            version=SCHEMA_VERSION,
            job_class=self.job_class,
            tenant=self.tenant,
            cost=expected + each * sampling.num_choices,
            seed=secrets.randbelow(MAX_SEED) if sampling.seed is None else sampling.seed,
            deadline_ms=self.deadline_ms,
            delay_ms=self.delay_ms,
            run_at_ms=self.run_at_ms,
            queue_ttl_ms=self.queue_ttl_ms,
            result_ttl_ms=self.result_ttl_ms,
            idempotency=self.idempotency,
            body_hash=self.body_hash if self.idempotency_key is not None else "",
            prompt_tokens=prompt_tokens,
            output_tokens=sampling.max_tokens or 0,
            allow_unknown=self.allow_unknown_model,
        )


def check_options(options: JobOptions, limits: Limits) -> CheckedJob:
    """Checks everything that can be known without the server. Raises InvalidJob, JobTooLarge.

    An unknown name raises TypeError, as calling a function with it would.
    """
    unknown = set(options) - set(JobOptions.__annotations__)
    if unknown or "model" not in options:
        what = f"unknown: {', '.join(sorted(unknown))}" if unknown else "model is missing"
        raise TypeError(f"{what}; a job takes {', '.join(JobOptions.__annotations__)}")
    body = _body(options, limits)
    key, deadline_s, delay_s = (
        options.get("idempotency_key"),
        options.get("deadline_s"),
        options.get("delay_s"),
    )
    return CheckedJob(
        model=keys.check_model(check_text("model", options["model"])),
        body=body,
        encoded=check_size(encode(body), limits),
        job_class=_job_class(options.get("job_class", "normal")),
        tenant=keys.check_tenant(check_text("tenant", options.get("tenant", "default"))),
        deadline_ms=0 if deadline_s is None else _ms("deadline_s", deadline_s),
        delay_ms=0 if delay_s is None else _ms("delay_s", delay_s, zero=True),
        run_at_ms=_run_at_ms(options),
        queue_ttl_ms=_ms("queue_ttl_s", options.get("queue_ttl_s", DEFAULT_QUEUE_TTL_S)),
        result_ttl_ms=_ms("result_ttl_s", options.get("result_ttl_s", DEFAULT_RESULT_TTL_S)),
        idempotency_key=None if key is None else check_text("idempotency_key", key, most=MAX_KEY_CHARS),
        allow_unknown_model=check_bool("allow_unknown_model", options.get("allow_unknown_model", False)),
    )


def _body(options: JobOptions, limits: Limits) -> JobBody:
    fields: dict[str, Any] = {
        name: value for name in _BODY_FIELDS if (value := options.get(name)) is not None
    }
    return check_body(JobBody(**fields), limits)


def _without_trace(body: JobBody) -> JobBody:
    return replace(body, traceparent=None, metadata=dict(sorted(body.metadata.items())))


def _job_class(value: object) -> JobClass:
    for known in JOB_CLASSES:
        if value == known:
            return known
    raise InvalidJob(f"job_class = {str(value)[:40]!r} is none of {', '.join(JOB_CLASSES)}")


def _ms(name: str, value: object, *, zero: bool = False) -> int:
    """A duration; at least 1 ms unless `zero`, since on the server 0 means "not given"."""
    return round(check_float(name, value, 0 if zero else 0.001, MAX_DURATION_S) * 1000)


def _run_at_ms(options: JobOptions) -> int:
    run_at = options.get("run_at")
    if run_at is None:
        return 0
    if options.get("delay_s") is not None:
        raise InvalidJob("delay_s and run_at exclude each other")
    if not isinstance(run_at, datetime) or run_at.utcoffset() is None:
        raise InvalidJob("run_at has to be a datetime with a time zone")
    from_now_s = (run_at - datetime.now(UTC)).total_seconds()
    if from_now_s > MAX_DURATION_S:
        raise InvalidJob(f"run_at is {from_now_s:.0f} s ahead, more than {MAX_DURATION_S:.0f}")
    return max(0, round(run_at.timestamp() * 1000))


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()
