"""Every message that crosses Redis, as msgpack of the structs below.

The body of a job is a map with field names (it lives long and is read by other languages);
events are arrays whose first element is the tag (they are many and short). Unknown trailing
elements of an array and unknown keys of a map are ignored by a reader, so that fields can be
appended without a new schema version; a version is raised only when an old reader would do
the wrong thing.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec
from msgspec import Struct

SCHEMA_VERSION = 1

JobClass: TypeAlias = Literal["high", "normal", "low", "batch"]
JOB_CLASSES: tuple[JobClass, ...] = ("high", "normal", "low", "batch")

JobState: TypeAlias = Literal["waiting", "delayed", "running", "finished", "failed", "cancelled"]
TERMINAL_STATES: frozenset[JobState] = frozenset(("finished", "failed", "cancelled"))

FinishReason: TypeAlias = Literal["stop", "length"]
"""`stop`: an end-of-sequence token, a stop id or a stop string. `length`: max_tokens or the context's end."""

FailureCode: TypeAlias = Literal[
    "invalid", "deadline", "queue_timeout", "dead_letter", "numerics", "internal"
]
"""`invalid`: the job can never run (its message has the numbers). `deadline`, `queue_timeout`: out of time.
`dead_letter`: it used up its attempts. `numerics`: its logits were not finite. `internal`: our fault."""


class Message(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One chat message, as chat templates expect it."""

    role: str
    content: str


class SamplingParams(Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """How tokens are chosen and when to stop.

    `max_tokens` None means as many as the context has room for. `temperature` 0 is greedy.
    `top_k` 0, `top_p` 1 and `min_p` 0 switch these filters off; they apply in this order after
    the temperature. `seed` None lets the client draw one, so that every job can be repeated.
    A stop string ends the text just before it unless `include_stop`; a stop id or an
    end-of-sequence token counts as an output token and adds no text.
    `min_tokens` bans every ending but `length` before that many tokens.
    """

    max_tokens: int | None = None
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    include_stop: bool = False
    skip_special_tokens: bool = True


class JobBody(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a producer asks for. Exactly one of `messages`, `prompt` and `token_ids` is set."""

    version: int = SCHEMA_VERSION
    messages: tuple[Message, ...] | None = None
    prompt: str | None = None
    token_ids: tuple[int, ...] | None = None
    sampling: SamplingParams = SamplingParams()
    metadata: dict[str, str] = {}
    traceparent: str | None = None


class ChoiceDelta(Struct, frozen=True, array_like=True, omit_defaults=True):
    """What one event adds to one choice of a job.

    `offset` is the number of output tokens before `token_ids`. `text` is the text that became
    final with this event: it may be empty while a character is incomplete or a stop string may
    have begun; the joined texts of all events are the text of the result.
    """

    index: int
    offset: int
    token_ids: tuple[int, ...] = ()
    text: str = ""
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None


class Usage(Struct, frozen=True, array_like=True, omit_defaults=True):
    """Token counts of a job. `cached_tokens` of the prompt came from the prefix cache."""

    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0


class Queued(Struct, frozen=True, array_like=True, tag="queued"):
    """The job waits. Made by the client on subscribing (seq 0, not in the log); position 1 is next."""

    seq: int
    position: int
    eta_s: float | None = None


class Started(Struct, frozen=True, array_like=True, tag="started"):
    """A worker has taken the job for the first time. `at_ms` is the server's clock, as everywhere."""

    seq: int
    epoch: int
    at_ms: int
    worker: str = ""


class Resumed(Struct, frozen=True, array_like=True, tag="resumed"):
    """Another attempt goes on after the last logged token."""

    seq: int
    epoch: int
    at_ms: int
    worker: str = ""


class Tokens(Struct, frozen=True, array_like=True, tag="tokens", omit_defaults=True):
    """New output tokens. `prompt` holds the facts about the prompt, in a job's first Tokens event only."""

    seq: int
    epoch: int
    at_ms: int
    choices: tuple[ChoiceDelta, ...] = ()
    prompt: Usage | None = None


class Finished(Struct, frozen=True, array_like=True, tag="finished"):
    """The job is done and its result is stored."""

    seq: int
    epoch: int
    at_ms: int
    usage: Usage = Usage()


class Failed(Struct, frozen=True, array_like=True, tag="failed"):
    """The job ended without a result."""

    seq: int
    epoch: int
    at_ms: int
    code: FailureCode = "internal"
    message: str = ""


class Cancelled(Struct, frozen=True, array_like=True, tag="cancelled"):
    """The job was cancelled."""

    seq: int
    epoch: int
    at_ms: int


Event: TypeAlias = Queued | Started | Resumed | Tokens | Finished | Failed | Cancelled
LoggedEvent: TypeAlias = Started | Resumed | Tokens | Finished | Failed | Cancelled
TERMINAL_EVENTS = (Finished, Failed, Cancelled)


class Choice(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One finished answer of a job."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    stop_reason: str | int | None = None


class Timings(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """When things happened, in ms since the epoch by the server's clock. Boarded is the first attempt's claim."""

    submitted_ms: int
    boarded_ms: int = 0
    first_token_ms: int = 0
    finished_ms: int = 0


class JobResult(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What `Client.result` returns."""

    job_id: str
    choices: tuple[Choice, ...]
    usage: Usage
    timings: Timings
    attempts: int = 1
    metadata: dict[str, str] = {}

    @property
    def text(self) -> str:
        """The text of the first choice."""
        return self.choices[0].text


class ModelInfo(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What workers announce of a model, and what the client checks before it submits.

    `context_tokens`: prompt and output together. `pool_tokens`: slots of the smallest worker's KV pool.
    `previous_partitions`: before the last growth; idempotency keys are looked up there too (0: never grown).
    `fingerprint` covers everything that decides a job's tokens: weights, dtype, tokenizer, template, limits.
    """

    fingerprint: str
    partitions: int = 1
    previous_partitions: int = 0
    context_tokens: int = 0
    pool_tokens: int = 0


class Limits(Struct, frozen=True, kw_only=True):
    """Sizes that are checked at the door, before anything is sent."""

    body_bytes: int = 4 * 1024 * 1024
    prompt_tokens: int = 1_000_000
    messages: int = 4096
    stop_strings: int = 16
    stop_string_chars: int = 256
    stop_token_ids: int = 256
    metadata_bytes: int = 16 * 1024


_event_decoder = msgspec.msgpack.Decoder(LoggedEvent)
_body_decoder = msgspec.msgpack.Decoder(JobBody)
_result_decoder = msgspec.msgpack.Decoder(JobResult)
_model_decoder = msgspec.msgpack.Decoder(ModelInfo)
_encoder = msgspec.msgpack.Encoder()


def encode(message: Struct) -> bytes:
    """Any of the structs above as msgpack."""
    return _encoder.encode(message)


def decode_event(data: bytes) -> LoggedEvent:
    """An entry of the event log, or a message of the channel."""
    return _event_decoder.decode(data)


def decode_body(data: bytes) -> JobBody:
    """A job's body. Raises msgspec.ValidationError where a producer broke the schema."""
    return _body_decoder.decode(data)


def decode_result(data: bytes) -> JobResult:
    """A stored result."""
    return _result_decoder.decode(data)


def decode_model(data: bytes) -> ModelInfo:
    """An entry of the models hash."""
    return _model_decoder.decode(data)
