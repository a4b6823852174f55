"""Input checking at the door: whatever a caller can get wrong raises InvalidJob here, with the numbers.

Nothing is sent before everything is checked, so that a mistake is an error at the line that made it and
not a failed job some time later.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from chairlift_client.errors import InvalidJob, JobTooLarge
from chairlift_client.protocol import Limits, Message, SamplingParams

MAX_TOKEN_ID = 2**31 - 1
MAX_SEED = 2**63 - 1
MAX_COUNT = 2**31 - 1
MAX_TEMPERATURE = 100.0
MIN_TEMPERATURE = 1e-4
"""Below, logits divided by the temperature leave the range of fp32; 0 is greedy and allowed."""

MAX_ROLE_CHARS = 64


def check_int(name: str, value: object, least: int, most: int) -> int:
    """An int (no bool) within the closed range."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidJob(f"{name} has to be an int, not {_type_name(value)}")
    if not least <= value <= most:
        raise InvalidJob(f"{name} = {value} is outside {least} … {most}")
    return value


def check_float(name: str, value: object, least: float, most: float, *, open_below: bool = False) -> float:
    """A finite number (no bool) within the range; with `open_below` the lower bound itself is outside."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InvalidJob(f"{name} has to be a number, not {_type_name(value)}")
    if not math.isfinite(value):
        raise InvalidJob(f"{name} = {value} is not finite")
    if not least <= value <= most or (open_below and value == least):
        sign = "more than " if open_below else ""
        raise InvalidJob(f"{name} = {value:g} is outside {sign}{least:g} … {most:g}")
    return float(value)


def check_bool(name: str, value: object) -> bool:
    """True or False, nothing that merely looks like them."""
    if not isinstance(value, bool):
        raise InvalidJob(f"{name} has to be True or False, not {_type_name(value)}")
    return value


def check_text(name: str, value: object, *, least: int = 1, most: int | None = None) -> str:
    """A string that UTF-8 can carry, with a length (in characters) within the range."""
    if not isinstance(value, str):
        raise InvalidJob(f"{name} has to be a str, not {_type_name(value)}")
    if len(value) < least:
        raise InvalidJob(
            f"{name} is empty" if not value else f"{name} has {len(value)} of {least} characters"
        )
    if most is not None and len(value) > most:
        raise JobTooLarge(f"{name} has {len(value)} characters, more than {most}")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise InvalidJob(f"{name} holds a lone surrogate at character {error.start}") from None
    return value


def check_items(name: str, value: object, most: int) -> Sequence[Any]:
    """A list or tuple of at most `most` items."""
    if not isinstance(value, list | tuple):
        raise InvalidJob(f"{name} has to be a list or a tuple, not {_type_name(value)}")
    if len(value) > most:
        raise JobTooLarge(f"{name} has {len(value)} items, more than {most}")
    return value


def check_token_ids(name: str, value: object, most: int) -> tuple[int, ...]:
    """Token ids; whether they are in the vocabulary, only the worker knows."""
    items = check_items(name, value, most)
    return tuple(check_int(f"{name}[{index}]", item, 0, MAX_TOKEN_ID) for index, item in enumerate(items))


def check_messages(value: object, limits: Limits) -> tuple[Message, ...]:
    """Chat messages, as Message or as dicts with `role` and `content`."""
    items = check_items("messages", value, limits.messages)
    if not items:
        raise InvalidJob("messages is empty")
    return tuple(_message(f"messages[{index}]", item) for index, item in enumerate(items))


def _message(name: str, value: object) -> Message:
    if isinstance(value, Mapping):
        if set(value) != {"role", "content"}:
            raise InvalidJob(f"{name} has the keys {sorted(map(str, value))}, not just role and content")
        role, content = value["role"], value["content"]
    elif isinstance(value, Message):
        role, content = value.role, value.content
    else:
        raise InvalidJob(f"{name} has to be a Message or a dict, not {_type_name(value)}")
    return Message(
        role=check_text(f"{name}.role", role, most=MAX_ROLE_CHARS),
        content=check_text(f"{name}.content", content, least=0),
    )


def check_metadata(value: object, limits: Limits) -> dict[str, str]:
    """The caller's own notes: a dict of strings, bounded in bytes."""
    if not isinstance(value, Mapping):
        raise InvalidJob(f"metadata has to be a dict of str, not {_type_name(value)}")
    checked = {
        check_text("a key of metadata", key): check_text(f"metadata[{key!r}]", item, least=0)
        for key, item in value.items()
    }
    num_bytes = sum(len(key.encode()) + len(item.encode()) for key, item in checked.items())
    if num_bytes > limits.metadata_bytes:
        raise JobTooLarge(f"metadata has {num_bytes} bytes, more than {limits.metadata_bytes}")
    return checked


def check_sampling(value: object, limits: Limits) -> SamplingParams:
    """Every field within its range. A dict is taken for a SamplingParams; unknown names are refused."""
    given = _as_sampling(value)
    stop = (given.stop,) if isinstance(given.stop, str) else given.stop
    max_tokens = given.max_tokens
    if max_tokens is not None:
        check_int("max_tokens", max_tokens, 1, MAX_COUNT)
    check_int("min_tokens", given.min_tokens, 0, MAX_COUNT if max_tokens is None else max_tokens)
    if given.seed is not None:
        check_int("seed", given.seed, 0, MAX_SEED)
    return SamplingParams(
        max_tokens=max_tokens,
        min_tokens=given.min_tokens,
        temperature=_temperature(given.temperature),
        top_k=check_int("top_k", given.top_k, 0, MAX_COUNT),
        top_p=check_float("top_p", given.top_p, 0, 1, open_below=True),
        min_p=check_float("min_p", given.min_p, 0, 1),
        seed=given.seed,
        stop=_stop_strings(stop, limits),
        stop_token_ids=check_token_ids("stop_token_ids", given.stop_token_ids, limits.stop_token_ids),
        ignore_eos=check_bool("ignore_eos", given.ignore_eos),
        include_stop=check_bool("include_stop", given.include_stop),
        skip_special_tokens=check_bool("skip_special_tokens", given.skip_special_tokens),
    )


def _as_sampling(value: object) -> SamplingParams:
    if value is None:
        return SamplingParams()
    if isinstance(value, SamplingParams):
        return value
    if not isinstance(value, Mapping):
        raise InvalidJob(f"sampling has to be a SamplingParams or a dict, not {_type_name(value)}")
    known = SamplingParams.__struct_fields__
    unknown = [str(name) for name in value if name not in known]
    if unknown:
        raise InvalidJob(f"sampling has no {', '.join(unknown)}; known are {', '.join(known)}")
    return SamplingParams(**value)


def _temperature(value: object) -> float:
    temperature = check_float("temperature", value, 0, MAX_TEMPERATURE)
    if 0 < temperature < MIN_TEMPERATURE:
        raise InvalidJob(f"temperature = {temperature:g} is under {MIN_TEMPERATURE:g}; use 0 for greedy")
    return temperature


def _stop_strings(value: object, limits: Limits) -> tuple[str, ...]:
    items = check_items("stop", value, limits.stop_strings)
    return tuple(
        check_text(f"stop[{index}]", item, most=limits.stop_string_chars) for index, item in enumerate(items)
    )


def check_size(encoded: bytes, limits: Limits) -> bytes:
    """The encoded body, within its limit."""
    if len(encoded) > limits.body_bytes:
        raise JobTooLarge(f"the job has {len(encoded)} bytes, more than {limits.body_bytes}")
    return encoded


def _type_name(value: object) -> str:
    return "None" if value is None else type(value).__name__
