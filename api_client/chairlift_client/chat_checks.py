"""Chat input: messages, tools and a template of the caller's own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from chairlift_client.checks import check_items, check_json, check_text, type_name
from chairlift_client.errors import InvalidJob
from chairlift_client.limits import Limits
from chairlift_client.protocol import Message

MAX_NAME_CHARS = 64
MAX_CALL_ID_CHARS = 128
MAX_TOOL_CALLS = 128
_FIELDS = Message.__struct_fields__


def check_messages(value: object, limits: Limits) -> tuple[Message, ...]:
    """Chat messages, as Message or as dicts of the same fields.

    A dict's `content` may also be a list of parts, as of OpenAI's protocol: their texts are joined by line
    ends. Parts that are no text are refused.
    """
    items = check_items("messages", value, limits.messages)
    if not items:
        raise InvalidJob("messages is empty")
    return tuple(_message(f"messages[{index}]", item, limits) for index, item in enumerate(items))


def check_tools(value: object, limits: Limits) -> tuple[dict[str, Any], ...]:
    """Functions for a chat template: dicts that JSON can express."""
    items = check_items("tools", value, limits.tools)
    for index, item in enumerate(items):
        if not isinstance(item, Mapping):
            raise InvalidJob(f"tools[{index}] has to be a dict, not {type_name(item)}")
    check_json("tools", items, limits)
    return tuple(dict(item) for item in items)


def check_chat_template(value: object, limits: Limits) -> str:
    """A Jinja source; whether it is valid, only rendering tells."""
    return check_text("chat_template", value, most=limits.template_chars)


def _message(name: str, value: object, limits: Limits) -> Message:
    if isinstance(value, Mapping):
        given: dict[str, object] = dict(value)
    elif isinstance(value, Message):
        given = {field: getattr(value, field) for field in _FIELDS}
    else:
        raise InvalidJob(f"{name} has to be a Message or a dict, not {type_name(value)}")
    unknown = [str(key) for key in given if key not in _FIELDS]
    if unknown or "role" not in given:
        raise InvalidJob(f"{name} has the keys {sorted(map(str, given))}; known are {', '.join(_FIELDS)}")
    calls = given.get("tool_calls")
    if given.get("content") is None and not calls:
        raise InvalidJob(f"{name} has neither content nor tool_calls")
    return Message(
        role=check_text(f"{name}.role", given["role"], most=MAX_NAME_CHARS),
        content=_content(f"{name}.content", given.get("content")),
        name=_optional(f"{name}.name", given.get("name"), MAX_NAME_CHARS),
        tool_calls=None if calls is None else _tool_calls(f"{name}.tool_calls", calls, limits),
        tool_call_id=_optional(f"{name}.tool_call_id", given.get("tool_call_id"), MAX_CALL_ID_CHARS),
    )


def _content(name: str, value: object) -> str:
    if value is None:
        return ""
    if not isinstance(value, list | tuple):
        return check_text(name, value, least=0)
    return "\n".join(_part(f"{name}[{index}]", part) for index, part in enumerate(value))


def _part(name: str, value: object) -> str:
    if not isinstance(value, Mapping) or value.get("type") != "text":
        kind = value.get("type") if isinstance(value, Mapping) else type_name(value)
        raise InvalidJob(f"{name} has to be a part of type text, not {str(kind)[:40]}")
    return check_text(f"{name}.text", value.get("text"), least=0)


def _optional(name: str, value: object, most: int) -> str | None:
    return None if value is None else check_text(name, value, most=most)


def _tool_calls(name: str, value: object, limits: Limits) -> tuple[dict[str, Any], ...]:
    calls = check_items(name, value, MAX_TOOL_CALLS)
    for index, call in enumerate(calls):
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise InvalidJob(f"{name}[{index}] has to be a dict with a function that has a name")
    check_json(name, calls, limits)
    return tuple(dict(call) for call in calls)
