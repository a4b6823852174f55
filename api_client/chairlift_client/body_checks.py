"""A whole job body, checked by the client before it is sent and by the worker before it runs."""

from __future__ import annotations

import re

from chairlift_client.chat_checks import check_chat_template, check_messages, check_tools
from chairlift_client.checks import check_bool, check_metadata, check_text, check_token_ids
from chairlift_client.errors import InvalidJob
from chairlift_client.limits import Limits
from chairlift_client.protocol import JobBody
from chairlift_client.sampling_checks import check_sampling
from chairlift_client.structured_checks import check_structured

MAX_ADAPTER_CHARS = 96
_TRACEPARENT = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")


def check_body(given: JobBody, limits: Limits) -> JobBody:
    """The body as it goes over the wire. Raises InvalidJob and JobTooLarge, with the numbers.

    The fields of `given` may hold what people write: dicts in place of structs, lists in place of tuples.
    """
    _check_input(given)
    sampling = check_sampling(given.sampling, limits)
    return JobBody(
        version=given.version,
        messages=None if given.messages is None else check_messages(given.messages, limits),
        prompt=None if given.prompt is None else check_text("prompt", given.prompt),
        token_ids=None if given.token_ids is None else _token_ids(given.token_ids, limits),
        sampling=sampling,
        metadata=check_metadata(given.metadata, limits),
        traceparent=_traceparent(given.traceparent),
        tools=None if given.tools is None else check_tools(given.tools, limits),
        chat_template=_chat_template(given.chat_template, limits),
        structured=None if given.structured is None else check_structured(given.structured, sampling, limits),
        cache=check_bool("cache", given.cache),
        adapter=_adapter(given.adapter),
    )


def _check_input(given: JobBody) -> None:
    names = [name for name in ("messages", "prompt", "token_ids") if getattr(given, name) is not None]
    if len(names) != 1:
        raise InvalidJob(
            f"exactly one of messages, prompt and token_ids, not {' and '.join(names) or 'none'}"
        )
    if given.messages is None and (given.tools is not None or given.chat_template is not None):
        raise InvalidJob(
            "tools and chat_template need messages: a prompt and token_ids are taken as they are"
        )


def _token_ids(value: object, limits: Limits) -> tuple[int, ...]:
    checked = check_token_ids("token_ids", value, limits.prompt_tokens)
    if not checked:
        raise InvalidJob("token_ids is empty")
    return checked


def _chat_template(value: object, limits: Limits) -> str | None:
    return None if value is None else check_chat_template(value, limits)


def _adapter(value: object) -> str | None:
    return None if value is None else check_text("adapter", value, most=MAX_ADAPTER_CHARS)


def _traceparent(value: object) -> str | None:
    if value is not None and _TRACEPARENT.fullmatch(check_text("traceparent", value, most=55)) is None:
        raise InvalidJob("traceparent is not of the form 00-<32 hex>-<16 hex>-<2 hex>")
    return None if value is None else str(value)
