"""Chat templates: Jinja sources that come with a model, rendered in a sandbox.

They see what transformers shows them (messages, add_generation_prompt, the special tokens by name,
raise_exception, strftime_now, tojson), except that their clock is the job's: a template that prints
the date then prints the same one whenever and wherever the job runs.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any, NoReturn

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from chairlift_client.errors import InvalidJob
from chairlift_worker.models.chat import Chat

_FAILURES = (
    jinja2.TemplateError,
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    ArithmeticError,
    RecursionError,
    MemoryError,
)
"""What running a template can raise: its own refusals, and slips on messages it did not foresee."""


class _GenerationTag(Extension):
    """`{% generation %}` marks the assistant's words for training; for us it is only its content."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it so

    def parse(self, parser: Parser) -> list[Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """One compiled template with the special tokens it may print."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """`special_tokens` by the names that templates know them by, like bos_token."""
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _refuse
        self._template = environment.from_string(source)
        self._special_tokens = dict(special_tokens)

    def render(self, chat: Chat, submitted_ms: int) -> str:
        """The prompt's text, up to where the assistant's answer begins.

        InvalidJob, with the template's words, where the template does not take these messages.
        """
        try:
            return self._template.render(
                self._special_tokens,
                messages=chat.messages,
                tools=chat.tools,
                documents=None,
                add_generation_prompt=True,
                strftime_now=_clock(submitted_ms),
            )
        except _FAILURES as error:
            raise InvalidJob(f"the chat template does not take these messages: {error}") from error


def _clock(submitted_ms: int) -> Callable[[str], str]:
    return datetime.fromtimestamp(submitted_ms / 1000, UTC).strftime


def _refuse(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
