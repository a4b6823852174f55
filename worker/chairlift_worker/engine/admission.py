"""What the engine refuses on arrival, so that nothing that boards can stop it.

The service has checked the user's input by the same rules where it can; the pool, the context and the
vocabulary are known only here. Every refusal names both numbers.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import isfinite

from chairlift_client.errors import InvalidJob
from chairlift_client.protocol import SamplingParams
from chairlift_worker.engine.output import ending_token_ids
from chairlift_worker.engine.request import EngineRequest
from chairlift_worker.engine.runner import RunnerSpec

MAX_PROMPT_LOGPROBS = 262_144
"""Numbers of prompt logprobs in one job: prompt tokens times (k + 1). They travel in one event."""


def max_output_tokens(request: EngineRequest, spec: RunnerSpec) -> int:
    """Output tokens after which a choice ends with `length`; InvalidJob if the job can never run.

    A prompt and its output may fill the context to the last token. The last output token is never
    computed, so the pool has room for one token more than it has slots. A job without `max_tokens`
    ends where the context or the pool does, whichever is smaller; one that asks for more than the
    pool can hold is refused.
    """
    num_prompt = len(request.prompt_token_ids)
    _check_prompt(num_prompt, spec)
    _check_token_ids("prompt", request.prompt_token_ids, spec.vocab_size)
    _check_sampling(request.sampling, spec)
    _check_prompt_logprobs(num_prompt, request.sampling)
    for word in request.bad_words:
        _check_token_ids("bad_words", word, spec.vocab_size)
    room = spec.longest_sequence - num_prompt
    asked = request.sampling.max_tokens
    if asked is not None:
        _check_length(num_prompt, asked, spec)
    allowed = room if asked is None else asked
    _check_log(request, allowed, spec)
    return allowed


def _check_prompt(num_prompt: int, spec: RunnerSpec) -> None:
    if num_prompt == 0:
        raise InvalidJob("the prompt has 0 tokens; at least 1 is needed")
    if num_prompt >= spec.context_tokens:
        raise InvalidJob(
            f"the prompt has {num_prompt} tokens; the context of {spec.context_tokens} leaves none for output"
        )
    if num_prompt >= spec.pool_tokens:
        raise InvalidJob(f"the prompt has {num_prompt} tokens; the KV pool has {spec.num_slots} slots")


def _check_length(num_prompt: int, max_tokens: int, spec: RunnerSpec) -> None:
    if max_tokens < 0:
        raise InvalidJob(f"max_tokens is {max_tokens}; it must not be negative")
    asked = f"prompt ({num_prompt}) and max_tokens ({max_tokens}) make {num_prompt + max_tokens} tokens"
    if num_prompt + max_tokens > spec.context_tokens:
        raise InvalidJob(f"{asked}; the context has {spec.context_tokens}")
    if num_prompt + max_tokens > spec.pool_tokens:
        raise InvalidJob(f"{asked}; the KV pool has room for {spec.pool_tokens}")


def _check_prompt_logprobs(num_prompt: int, sampling: SamplingParams) -> None:
    if sampling.prompt_logprobs is None:
        return
    num_numbers = num_prompt * (sampling.prompt_logprobs + 1)
    if num_numbers > MAX_PROMPT_LOGPROBS:
        raise InvalidJob(
            f"prompt_logprobs {sampling.prompt_logprobs} of {num_prompt} prompt tokens make {num_numbers} "
            f"numbers; at most {MAX_PROMPT_LOGPROBS} are told"
        )


def _check_log(request: EngineRequest, allowed: int, spec: RunnerSpec) -> None:
    logged = (request.logged_token_ids, *request.more_logged_token_ids)
    if len(logged) > max(1, request.sampling.num_choices):
        raise InvalidJob(f"the log has {len(logged)} choices; the job has {request.sampling.num_choices}")
    for token_ids in logged:
        _check_token_ids("logged output", token_ids, spec.vocab_size)
        if len(token_ids) > allowed:
            raise InvalidJob(f"the log has {len(token_ids)} output tokens, but {allowed} are allowed")


def _check_sampling(sampling: SamplingParams, spec: RunnerSpec) -> None:
    _check_ranges(sampling)
    _check_token_ids("stop_token_ids", sampling.stop_token_ids, spec.vocab_size)
    _check_token_ids("logit_bias", sampling.logit_bias, spec.vocab_size)
    _check_token_ids("banned_token_ids", sampling.banned_token_ids, spec.vocab_size)
    _check_token_ids("allowed_token_ids", sampling.allowed_token_ids or (), spec.vocab_size)
    _check_bans(sampling, spec)


def _check_ranges(sampling: SamplingParams) -> None:
    if sampling.n < 1 or sampling.num_choices < sampling.n:
        raise InvalidJob(
            f"n is {sampling.n} and best_of {sampling.best_of}; both must be at least 1, n least"
        )
    for name in ("temperature", "repetition_penalty"):
        value = getattr(sampling, name)
        if not (isfinite(value) and value >= 0.0) or (name == "repetition_penalty" and value == 0.0):
            raise InvalidJob(f"{name} is {value}; it must be finite and not negative")
    for name in ("top_p", "typical_p"):
        value = getattr(sampling, name)
        if not 0.0 < value <= 1.0:
            raise InvalidJob(f"{name} is {value}; it must be above 0 and at most 1")
    if not 0.0 <= sampling.min_p <= 1.0:
        raise InvalidJob(f"min_p is {sampling.min_p}; it must be between 0 and 1")
    if sampling.top_k < 0 or sampling.min_tokens < 0:
        raise InvalidJob(
            f"top_k is {sampling.top_k} and min_tokens {sampling.min_tokens}; they must not be negative"
        )
    numbers = (sampling.presence_penalty, sampling.frequency_penalty, *sampling.logit_bias.values())
    if not all(isfinite(number) for number in numbers):
        raise InvalidJob("presence_penalty, frequency_penalty and logit_bias must be finite")


def _check_bans(sampling: SamplingParams, spec: RunnerSpec) -> None:
    """Bans that hold at every position must leave something; so must those of the first `min_tokens`."""
    banned = frozenset(sampling.banned_token_ids)
    if _num_left(sampling, banned, spec) == 0:
        raise InvalidJob(f"allowed_token_ids and banned_token_ids leave none of {spec.vocab_size} tokens")
    endings = ending_token_ids(sampling, spec.eos_token_ids)
    if sampling.min_tokens > 0 and _num_left(sampling, banned | endings, spec) == 0:
        raise InvalidJob(
            f"every token that may be drawn ends the job, and min_tokens bans {len(endings)} of them"
        )


def _num_left(sampling: SamplingParams, banned: frozenset[int], spec: RunnerSpec) -> int:
    """Tokens that may be drawn."""
    if sampling.allowed_token_ids is None:
        return spec.vocab_size - len(banned)
    return len(frozenset(sampling.allowed_token_ids) - banned)


def _check_token_ids(what: str, token_ids: Iterable[int], vocab_size: int) -> None:
    for token_id in token_ids:
        if not 0 <= token_id < vocab_size:
            raise InvalidJob(f"token id {token_id} in {what} is outside the vocabulary of {vocab_size}")
