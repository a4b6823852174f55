"""Renders a template that came with a job: run apart, since a template can loop for ever or fill the memory.

stdin   `Order` as msgpack
stdout  `Rendered` as msgpack
"""

from __future__ import annotations

from typing import Any

import jinja2
import msgspec
from msgspec import Struct

from chairlift_client.errors import InvalidJob
from chairlift_worker.apart import ApartError, run_apart, serve_apart
from chairlift_worker.models.chat import Chat
from chairlift_worker.models.template import ChatTemplate

CPU_S = 2.0
MAX_CHARS = 8 * 1024 * 1024


class Order(Struct, frozen=True):
    """What to render."""

    source: str
    special_tokens: dict[str, str]
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None
    submitted_ms: int


class Rendered(Struct, frozen=True):
    """The prompt's text, or what was wrong."""

    text: str = ""
    problem: str = ""


def render_apart(
    source: str,
    special_tokens: dict[str, str],
    chat: Chat,
    submitted_ms: int,
    *,
    cpu_s: float = CPU_S,
) -> str:
    """As `ChatTemplate.render`, but killed when it takes too long. Raises InvalidJob."""
    order = Order(source, special_tokens, chat.messages, chat.tools, submitted_ms)
    try:
        answer = run_apart(__name__, msgspec.msgpack.encode(order), cpu_s)
    except ApartError as error:
        raise InvalidJob(f"chat_template cannot be rendered: {error}") from error
    rendered = msgspec.msgpack.decode(answer, type=Rendered)
    if rendered.problem:
        raise InvalidJob(rendered.problem)
    return rendered.text


def _render(data: bytes) -> bytes:
    order = msgspec.msgpack.decode(data, type=Order)
    return msgspec.msgpack.encode(_rendered(order))


def _rendered(order: Order) -> Rendered:
    try:
        template = ChatTemplate(order.source, order.special_tokens)
        text = template.render(Chat(order.messages, order.tools), order.submitted_ms)
    except jinja2.TemplateError as error:
        return Rendered(problem=f"chat_template is not valid: {error}")
    except InvalidJob as error:
        return Rendered(problem=str(error))
    if len(text) > MAX_CHARS:
        return Rendered(problem=f"chat_template made {len(text)} characters, more than {MAX_CHARS}")
    return Rendered(text)


if __name__ == "__main__":
    serve_apart(_render)
