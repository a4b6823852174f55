"""Input checking at the door: whatever a caller can get wrong raises InvalidJob here, with the numbers.

Nothing is sent before everything is checked, so that a mistake is an error at the line that made it and
not a failed job some time later.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from chairlift_client.errors import InvalidJob, JobTooLarge
from chairlift_client.limits import Limits

MAX_TOKEN_ID = 2**31 - 1
MAX_SEED = 2**63 - 1
MAX_COUNT = 2**31 - 1
MAX_JSON_INT = 2**63 - 1


def check_int(name: str, value: object, least: int, most: int) -> int:
    """An int (no bool) within the closed range."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidJob(f"{name} has to be an int, not {type_name(value)}")
    if not least <= value <= most:
        raise InvalidJob(f"{name} = {_shown(value)} is outside {least} … {most}")
    return value


def _shown(value: float) -> str:
    """As it is written in a message; an int with more digits than anybody reads (or Python prints) is cut."""
    if isinstance(value, float):
        return f"{value:g}"
    return f"{value}" if abs(value) < 10**30 else f"an int of {value.bit_length()} bits"


def check_float(name: str, value: object, least: float, most: float, *, open_below: bool = False) -> float:
    """A finite number (no bool) within the range; with `open_below` the lower bound itself is outside."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InvalidJob(f"{name} has to be a number, not {type_name(value)}")
    if isinstance(value, float) and not math.isfinite(value):
        raise InvalidJob(f"{name} = {value} is not finite")
    if not least <= value <= most or (open_below and value == least):
        sign = "more than " if open_below else ""
        raise InvalidJob(f"{name} = {_shown(value)} is outside {sign}{least:g} … {most:g}")
    return float(value)


def check_bool(name: str, value: object) -> bool:
    """True or False, nothing that merely looks like them."""
    if not isinstance(value, bool):
        raise InvalidJob(f"{name} has to be True or False, not {type_name(value)}")
    return value


def check_text(name: str, value: object, *, least: int = 1, most: int | None = None) -> str:
    """A string that UTF-8 can carry, with a length (in characters) within the range."""
    if not isinstance(value, str):
        raise InvalidJob(f"{name} has to be a str, not {type_name(value)}")
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
        raise InvalidJob(f"{name} has to be a list or a tuple, not {type_name(value)}")
    if len(value) > most:
        raise JobTooLarge(f"{name} has {len(value)} items, more than {most}")
    return value


def check_token_ids(name: str, value: object, most: int) -> tuple[int, ...]:
    """Token ids; whether they are in the vocabulary, only the worker knows."""
    items = check_items(name, value, most)
    return tuple(check_int(f"{name}[{index}]", item, 0, MAX_TOKEN_ID) for index, item in enumerate(items))


def check_strings(name: str, value: object, most: int, most_chars: int) -> tuple[str, ...]:
    """At most `most` non-empty strings of at most `most_chars` characters."""
    items = check_items(name, value, most)
    return tuple(check_text(f"{name}[{index}]", item, most=most_chars) for index, item in enumerate(items))


def check_json(name: str, value: object, limits: Limits) -> Any:
    """What JSON can express, of bounded depth and size."""
    _check_json_value(name, value, limits.json_depth, limits.json_depth)
    num_bytes = len(msgspec.json.encode(value))
    if num_bytes > limits.json_bytes:
        raise JobTooLarge(f"{name} has {num_bytes} bytes of JSON, more than {limits.json_bytes}")
    return value


def _check_json_value(name: str, value: object, depth: int, most: int) -> None:
    if depth < 0:
        raise JobTooLarge(f"{name} is nested more than {most} deep")
    if isinstance(value, Mapping):
        for key, item in value.items():
            check_text(f"a key of {name}", key, least=0)
            _check_json_value(name, item, depth - 1, most)
    elif isinstance(value, list | tuple):
        for item in value:
            _check_json_value(name, item, depth - 1, most)
    elif isinstance(value, str):
        check_text(f"a string in {name}", value, least=0)
    elif isinstance(value, float):
        check_float(f"a number in {name}", value, -math.inf, math.inf)
    elif isinstance(value, int) and not isinstance(value, bool):
        check_int(f"a number in {name}", value, -MAX_JSON_INT, MAX_JSON_INT)
    elif value is not None and not isinstance(value, bool):
        raise InvalidJob(f"{name} holds a {type_name(value)}, which JSON has no word for")


def check_metadata(value: object, limits: Limits) -> dict[str, str]:
    """The caller's own notes: a dict of strings, bounded in bytes."""
    if not isinstance(value, Mapping):
        raise InvalidJob(f"metadata has to be a dict of str, not {type_name(value)}")
    checked = {
        check_text("a key of metadata", key): check_text(f"metadata[{key!r}]", item, least=0)
        for key, item in value.items()
    }
    num_bytes = sum(len(key.encode()) + len(item.encode()) for key, item in checked.items())
    if num_bytes > limits.metadata_bytes:
        raise JobTooLarge(f"metadata has {num_bytes} bytes, more than {limits.metadata_bytes}")
    return checked


def check_size(encoded: bytes, limits: Limits) -> bytes:
    """The encoded body, within its limit."""
    if len(encoded) > limits.body_bytes:
        raise JobTooLarge(f"the job has {len(encoded)} bytes, more than {limits.body_bytes}")
    return encoded


def type_name(value: object) -> str:
    """How a message calls the kind of a value."""
    return "None" if value is None else type(value).__name__
