"""What the engine refuses on arrival, so that nothing that boards can stop it.

The service has checked the user's input by the same rules where it can; the pool and the context are
known only here. Every refusal names both numbers.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import isfinite

from chairlift_client.errors import InvalidJob
from chairlift_client.protocol import SamplingParams
from chairlift_worker.engine.output import ending_token_ids
from chairlift_worker.engine.request import EngineRequest
from chairlift_worker.engine.runner import RunnerSpec


def max_output_tokens(request: EngineRequest, spec: RunnerSpec) -> int:
    """Output tokens after which the job ends with `length`; InvalidJob if it can never run.

    A prompt and its output may fill the context to the last token. The last output token is never
    computed, so the pool has room for one token more than it has slots. A job without `max_tokens`
    ends where the context or the pool does, whichever is smaller; one that asks for more than the
    pool can hold is refused.
    """
    num_prompt = len(request.prompt_token_ids)
    _check_prompt(num_prompt, spec)
    _check_token_ids("prompt", request.prompt_token_ids, spec.vocab_size)
    _check_token_ids("logged output", request.logged_token_ids, spec.vocab_size)
    _check_sampling(request.sampling, spec)
    room = min(spec.context_tokens, _pool_tokens(spec)) - num_prompt
    asked = request.sampling.max_tokens
    if asked is not None:
        _check_length(num_prompt, asked, spec)
    allowed = room if asked is None else asked
    if len(request.logged_token_ids) > allowed:
        raise InvalidJob(
            f"the log has {len(request.logged_token_ids)} output tokens, but {allowed} are allowed"
        )
    return allowed


def _pool_tokens(spec: RunnerSpec) -> int:
    return spec.num_blocks * spec.block_size + 1


def _check_prompt(num_prompt: int, spec: RunnerSpec) -> None:
    if num_prompt == 0:
        raise InvalidJob("the prompt has 0 tokens; at least 1 is needed")
    if num_prompt >= spec.context_tokens:
        raise InvalidJob(
            f"the prompt has {num_prompt} tokens; the context of {spec.context_tokens} leaves none for output"
        )
    if num_prompt >= _pool_tokens(spec):
        raise InvalidJob(
            f"the prompt has {num_prompt} tokens; the KV pool has {spec.num_blocks * spec.block_size} slots"
        )


def _check_length(num_prompt: int, max_tokens: int, spec: RunnerSpec) -> None:
    if max_tokens < 1:
        raise InvalidJob(f"max_tokens is {max_tokens}; it must be at least 1")
    asked = f"prompt ({num_prompt}) and max_tokens ({max_tokens}) make {num_prompt + max_tokens} tokens"
    if num_prompt + max_tokens > spec.context_tokens:
        raise InvalidJob(f"{asked}; the context has {spec.context_tokens}")
    if num_prompt + max_tokens > _pool_tokens(spec):
        raise InvalidJob(f"{asked}; the KV pool has room for {_pool_tokens(spec)}")


def _check_sampling(sampling: SamplingParams, spec: RunnerSpec) -> None:
    _check_token_ids("stop_token_ids", sampling.stop_token_ids, spec.vocab_size)
    if not (isfinite(sampling.temperature) and sampling.temperature >= 0.0):
        raise InvalidJob(f"temperature is {sampling.temperature}; it must be finite and at least 0")
    if not 0.0 < sampling.top_p <= 1.0:
        raise InvalidJob(f"top_p is {sampling.top_p}; it must be above 0 and at most 1")
    if not 0.0 <= sampling.min_p <= 1.0:
        raise InvalidJob(f"min_p is {sampling.min_p}; it must be between 0 and 1")
    if sampling.top_k < 0 or sampling.min_tokens < 0:
        raise InvalidJob(
            f"top_k is {sampling.top_k} and min_tokens {sampling.min_tokens}; they must not be negative"
        )
    num_endings = len(ending_token_ids(sampling, spec.eos_token_ids))
    if sampling.min_tokens > 0 and num_endings >= spec.vocab_size:
        raise InvalidJob(f"all {spec.vocab_size} tokens end the job, and min_tokens bans them")


def _check_token_ids(what: str, token_ids: Iterable[int], vocab_size: int) -> None:
    for token_id in token_ids:
        if not 0 <= token_id < vocab_size:
            raise InvalidJob(f"token id {token_id} in {what} is outside the vocabulary of {vocab_size}")
