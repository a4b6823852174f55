"""The form that a text must have: what can be said of it without compiling it."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from chairlift_client.checks import check_json, check_strings, check_text, type_name
from chairlift_client.errors import InvalidJob
from chairlift_client.limits import Limits
from chairlift_client.sampling import Grammar, JsonSchema, OneOf, Regex, SamplingParams, Structured


def check_structured(value: object, sampling: SamplingParams, limits: Limits) -> Structured:
    """One of the four kinds, within its limits; a dict with `type` is taken for the struct."""
    if isinstance(value, Mapping):
        value = _from_dict(value)
    if sampling.ignore_eos:
        raise InvalidJob("structured and ignore_eos exclude each other: a complete text has to end")
    match value:
        case JsonSchema(schema=schema):
            return JsonSchema(schema=_schema(schema, limits))
        case Regex(pattern=pattern):
            return Regex(pattern=check_text("structured.pattern", pattern, most=limits.pattern_chars))
        case Grammar(grammar=grammar):
            return Grammar(grammar=check_text("structured.grammar", grammar, most=limits.grammar_chars))
        case OneOf(options=options):
            return OneOf(options=_options(options, limits))
    raise InvalidJob(f"structured has to be a JsonSchema, Regex, Grammar or OneOf, not {type_name(value)}")


def _from_dict(value: Mapping[object, object]) -> Structured:
    try:
        converted: Structured = msgspec.convert(dict(value), Structured)
    except msgspec.ValidationError as error:
        raise InvalidJob(f"structured: {error}") from error
    return converted


def _schema(schema: object, limits: Limits) -> dict[str, object] | bool:
    if isinstance(schema, bool):
        if not schema:
            raise InvalidJob("structured.schema is false: nothing matches it")
        return schema
    if not isinstance(schema, Mapping):
        raise InvalidJob(f"structured.schema has to be a dict or True, not {type_name(schema)}")
    check_json("structured.schema", schema, limits)
    return dict(schema)


def _options(options: object, limits: Limits) -> tuple[str, ...]:
    checked = check_strings("structured.options", options, limits.options, limits.option_chars)
    if not checked:
        raise InvalidJob("structured.options is empty")
    if len(set(checked)) < len(checked):
        raise InvalidJob("structured.options names one text twice")
    return checked
