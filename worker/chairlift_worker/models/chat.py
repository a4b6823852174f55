"""A chat as templates see it: messages and tools as plain dicts and lists."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from typing import Any, NamedTuple

from chairlift_client.protocol import Message


class Chat(NamedTuple):
    """What goes into a template."""

    messages: list[dict[str, Any]]
    """Each has `role` and `content`, and of the other fields those that are set."""
    tools: list[dict[str, Any]] | None = None

    def strings(self) -> Iterator[str]:
        """Every string that came from the user, but for roles."""
        for message in self.messages:
            yield from _strings({name: value for name, value in message.items() if name != "role"})
        yield from _strings(self.tools)

    def map_strings(self, change: Callable[[str], str]) -> Chat:
        """The same chat with every string changed, but for roles and the names of fields."""
        messages = [
            {
                name: value if name == "role" else _map_strings(value, change)
                for name, value in message.items()
            }
            for message in self.messages
        ]
        return Chat(messages, _map_strings(self.tools, change))


def make_chat(messages: Seq[Message], tools: Seq[dict[str, Any]] | None = None) -> Chat:
    """The chat of a job's body."""
    return Chat([_message(message) for message in messages], None if tools is None else list(tools))


def _message(message: Message) -> dict[str, Any]:
    fields: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.name is not None:
        fields["name"] = message.name
    if message.tool_calls is not None:
        fields["tool_calls"] = [_tool_call(call) for call in message.tool_calls]
    if message.tool_call_id is not None:
        fields["tool_call_id"] = message.tool_call_id
    return fields


def _tool_call(call: dict[str, Any]) -> dict[str, Any]:
    """OpenAI's protocol has the arguments as JSON in a string; templates expect the object itself."""
    function = dict(call["function"])
    if isinstance(function.get("arguments"), str):
        try:
            arguments = json.loads(function["arguments"])
        except ValueError:
            arguments = None
        if isinstance(arguments, dict):
            function["arguments"] = arguments
    return {**call, "function": function}


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield key
            yield from _strings(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _strings(item)


def _map_strings(value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        # Templates look fields up by name: a name is changed only where it holds a control token.
        return {change(key): _map_strings(item, change) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_map_strings(item, change) for item in value]
    return value
