"""Sampling parameters: every field within its range, and those that contradict each other refused."""

from __future__ import annotations

from collections.abc import Mapping

from chairlift_client.checks import (
    MAX_COUNT,
    MAX_SEED,
    MAX_TOKEN_ID,
    check_bool,
    check_float,
    check_int,
    check_strings,
    check_token_ids,
    type_name,
)
from chairlift_client.errors import InvalidJob, JobTooLarge
from chairlift_client.limits import Limits
from chairlift_client.sampling import SamplingParams

MAX_TEMPERATURE = 100.0
MIN_TEMPERATURE = 1e-4
"""Below, logits divided by the temperature leave the range of fp32; 0 is greedy and allowed."""

MIN_REPETITION_PENALTY = 0.01
MAX_REPETITION_PENALTY = 100.0
MAX_PENALTY = 100.0
MAX_BIAS = 1000.0
"""More than logits ever differ by, and far from where fp32 ends."""


def check_sampling(value: object, limits: Limits) -> SamplingParams:
    """Every field within its range. A dict is taken for a SamplingParams; unknown names are refused."""
    given = _as_sampling(value)
    stop = (given.stop,) if isinstance(given.stop, str) else given.stop
    return SamplingParams(
        max_tokens=_optional_int("max_tokens", given.max_tokens, 0, MAX_COUNT),
        min_tokens=_min_tokens(given),
        truncate_prompt=_optional_int("truncate_prompt", given.truncate_prompt, 1, limits.prompt_tokens),
        n=check_int("n", given.n, 1, limits.choices),
        best_of=_optional_int("best_of", given.best_of, given.n, limits.choices),
        temperature=_temperature(given.temperature),
        top_k=check_int("top_k", given.top_k, 0, MAX_COUNT),
        top_p=check_float("top_p", given.top_p, 0, 1, open_below=True),
        min_p=check_float("min_p", given.min_p, 0, 1),
        typical_p=check_float("typical_p", given.typical_p, 0, 1, open_below=True),
        seed=_optional_int("seed", given.seed, 0, MAX_SEED),
        repetition_penalty=check_float(
            "repetition_penalty", given.repetition_penalty, MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY
        ),
        presence_penalty=check_float("presence_penalty", given.presence_penalty, -MAX_PENALTY, MAX_PENALTY),
        frequency_penalty=check_float(
            "frequency_penalty", given.frequency_penalty, -MAX_PENALTY, MAX_PENALTY
        ),
        logit_bias=_logit_bias(given.logit_bias, limits),
        allowed_token_ids=_allowed(given, limits),
        banned_token_ids=check_token_ids("banned_token_ids", given.banned_token_ids, limits.banned_token_ids),
        bad_words=check_strings("bad_words", given.bad_words, limits.bad_words, limits.bad_word_chars),
        stop=check_strings("stop", stop, limits.stop_strings, limits.stop_string_chars),
        stop_token_ids=check_token_ids("stop_token_ids", given.stop_token_ids, limits.stop_token_ids),
        ignore_eos=check_bool("ignore_eos", given.ignore_eos),
        include_stop=check_bool("include_stop", given.include_stop),
        skip_special_tokens=check_bool("skip_special_tokens", given.skip_special_tokens),
        logprobs=_optional_int("logprobs", given.logprobs, 0, limits.logprobs),
        prompt_logprobs=_optional_int("prompt_logprobs", given.prompt_logprobs, 0, limits.logprobs),
    )


def _as_sampling(value: object) -> SamplingParams:
    if value is None:
        return SamplingParams()
    if isinstance(value, SamplingParams):
        return value
    if not isinstance(value, Mapping):
        raise InvalidJob(f"sampling has to be a SamplingParams or a dict, not {type_name(value)}")
    known = SamplingParams.__struct_fields__
    unknown = [str(name) for name in value if name not in known]
    if unknown:
        raise InvalidJob(f"sampling has no {', '.join(unknown)}; known are {', '.join(known)}")
    return SamplingParams(**value)


def _optional_int(name: str, value: object, least: int, most: int) -> int | None:
    return None if value is None else check_int(name, value, least, most)


def _min_tokens(given: SamplingParams) -> int:
    most = given.max_tokens if isinstance(given.max_tokens, int) else MAX_COUNT
    return check_int("min_tokens", given.min_tokens, 0, max(most, 0))


def _temperature(value: object) -> float:
    temperature = check_float("temperature", value, 0, MAX_TEMPERATURE)
    if 0 < temperature < MIN_TEMPERATURE:
        raise InvalidJob(f"temperature = {temperature:g} is under {MIN_TEMPERATURE:g}; use 0 for greedy")
    return temperature


def _logit_bias(value: object, limits: Limits) -> dict[int, float]:
    if not isinstance(value, Mapping):
        raise InvalidJob(f"logit_bias has to be a dict of token id to number, not {type_name(value)}")
    if len(value) > limits.logit_bias:
        raise JobTooLarge(f"logit_bias has {len(value)} items, more than {limits.logit_bias}")
    return {
        check_int("a token id of logit_bias", token_id, 0, MAX_TOKEN_ID): check_float(
            f"logit_bias[{token_id}]", bias, -MAX_BIAS, MAX_BIAS
        )
        for token_id, bias in value.items()
    }


def _allowed(given: SamplingParams, limits: Limits) -> tuple[int, ...] | None:
    if given.allowed_token_ids is None:
        return None
    allowed = check_token_ids("allowed_token_ids", given.allowed_token_ids, limits.allowed_token_ids)
    if not allowed:
        raise InvalidJob("allowed_token_ids is empty: no token could ever be drawn; None allows all")
    return allowed
