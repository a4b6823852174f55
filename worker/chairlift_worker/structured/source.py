"""From what a job asks for to what llguidance reads. Imports no torch: the compile check runs apart."""

from __future__ import annotations

import json

from llguidance import LLMatcher, LLParserLimits

from chairlift_client.sampling import Grammar, JsonSchema, OneOf, Regex, Structured

_WHITESPACE = r"( |\n[ \t]{0,16})?"
"""Between the parts of JSON: a space, or a line end and an indentation. Bounded, so that a model in doubt
cannot write blanks for ever."""


def to_source(structured: Structured) -> str:
    """The grammar in llguidance's own notation; whether it is valid, only compiling tells."""
    match structured:
        case JsonSchema(schema=schema):
            source = _json_source(json.dumps({} if schema is True else schema))
        case Regex(pattern=pattern):
            source = LLMatcher.grammar_from_regex(pattern)
        case Grammar(grammar=grammar):
            source = LLMatcher.grammar_from_lark(grammar)
        case OneOf(options=options):
            alternatives = " | ".join(json.dumps(option, ensure_ascii=False) for option in options)
            source = LLMatcher.grammar_from_lark(f"start: {alternatives}\n")
    return source


def _json_source(schema: str) -> str:
    """A schema must not switch its own checks off, so both are given here."""
    return LLMatcher.grammar_from_json_schema(
        schema, overrides={"whitespace_pattern": _WHITESPACE, "lenient": False, "coerce_one_of": False}
    )


def limits() -> LLParserLimits:
    """What compiling and one step may cost: about 20 ms and 14 ms on a usual core; more is an error."""
    return LLParserLimits(initial_lexer_fuel=1_000_000, step_lexer_fuel=200_000, step_max_items=50_000)
