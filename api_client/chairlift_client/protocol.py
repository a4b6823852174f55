"""Every message that crosses Redis, as msgpack of the structs below.

The body of a job is a map with field names (it lives long and is read by other languages);
events are arrays whose first element is the tag (they are many and short). Unknown trailing
elements of an array and unknown keys of a map are ignored by a reader, so that fields can be
appended without a new schema version; a version is raised only when an old reader would do
the wrong thing.
"""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

import msgspec
from msgspec import Struct

from chairlift_client.limits import Limits as Limits
from chairlift_client.sampling import SamplingParams as SamplingParams
from chairlift_client.sampling import Structured as Structured

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
    """One chat message, as chat templates expect it; a template sees only the fields that are set."""

    role: str
    content: str = ""
    name: str | None = None
    tool_calls: tuple[dict[str, Any], ...] | None = None
    """Calls that the assistant made: maps with `function`, which has `name` and `arguments`."""
    tool_call_id: str | None = None
    """In a message of role "tool": the call that it answers."""


class JobBody(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a producer asks for. Exactly one of `messages`, `prompt` and `token_ids` is set.

    `tools` and `chat_template` go with `messages`: functions that the template tells the model about, and
    a template in place of the model's own. `structured` says what form the text must have. `cache` False
    keeps the job out of the prefix cache. `adapter` is the name of a LoRA adapter.
    """

    version: int = SCHEMA_VERSION
    messages: tuple[Message, ...] | None = None
    prompt: str | None = None
    token_ids: tuple[int, ...] | None = None
    sampling: SamplingParams = SamplingParams()
    metadata: dict[str, str] = {}
    traceparent: str | None = None
    tools: tuple[dict[str, Any], ...] | None = None
    chat_template: str | None = None
    structured: Structured | None = None
    cache: bool = True
    adapter: str | None = None


class TokenLogprobs(Struct, frozen=True, array_like=True, omit_defaults=True):
    """What the model itself thought of one token: natural logarithms of probabilities, no filter applied.

    `rank` is 1 for the most likely token. `top` are the most likely ones, the likeliest first and of equals
    the lower id, as (id, logprob).
    """

    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()


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
    logprobs: tuple[TokenLogprobs, ...] = ()
    """One for each of `token_ids`, where they are asked for."""


class Usage(Struct, frozen=True, array_like=True, omit_defaults=True):
    """Token counts of a job, the output over all choices that were made.

    `cached_tokens` of the prompt came from the prefix cache.
    """

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
    """New output tokens. `prompt` holds the facts about the prompt, in a job's first Tokens event only.

    `prompt_logprobs` stands there too, if asked for: one for each token of the prompt, None for the first.
    `candidates` are outputs of a `best_of` job. They are logged, so that the job can be resumed, but only
    the last event tells in `choices` which of them are kept. `adapter`, beside `prompt`, is a hash of the
    weights of the job's adapter: another worker goes on only with the same ones.
    """

    seq: int
    epoch: int
    at_ms: int
    choices: tuple[ChoiceDelta, ...] = ()
    prompt: Usage | None = None
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    candidates: tuple[ChoiceDelta, ...] = ()
    adapter: str = ""


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
    logprobs: tuple[TokenLogprobs, ...] | None = None


class Timings(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """When things happened, in ms since the epoch by the server's clock; boarded is the first claim."""

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
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None

    @property
    def text(self) -> str:
        """The text of the first choice."""
        return self.choices[0].text


class ModelInfo(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What workers announce of a model, and what the client checks before it submits.

    `context_tokens`: prompt and output together. `pool_tokens`: of the longest sequence, prompt and output
    together, for which the KV pool of the smallest worker has room.
    `previous_partitions`: before the last growth; idempotency keys are looked up there too (0: never grown).
    `fingerprint` covers everything that decides a job's tokens: weights, dtype, tokenizer, template, limits.
    `adapters`: whether jobs may name one; which ones there are is the workers' to know.
    """

    fingerprint: str
    partitions: int = 1
    previous_partitions: int = 0
    context_tokens: int = 0
    pool_tokens: int = 0
    adapters: bool = False


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
