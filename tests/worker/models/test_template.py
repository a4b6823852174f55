"""Chat templates: what they see, their clock, and how they refuse."""

from __future__ import annotations

import time
from datetime import UTC, datetime

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from chairlift_client.errors import InvalidJob
from chairlift_client.protocol import Message
from chairlift_worker.models.chat import make_chat
from chairlift_worker.models.template import ChatTemplate

MESSAGES = (Message(role="system", content="Be <brief>."), Message(role="user", content="Hi 👋"))
CHAT = make_chat(MESSAGES)
NOON_MS = int(datetime(2026, 1, 2, 23, 59, 30, tzinfo=UTC).timestamp() * 1000)

SOURCES = {
    "blocks": "{%- for m in messages %}\n  {%- if loop.first %}\n{{ bos_token }}{% endif %}\n"
    "  [{{ m.role }}]\n{% endfor %}",
    "loop controls": "{% for m in messages %}{% if loop.index == 2 %}{% break %}{% endif %}{{ m.content }}"
    "{% endfor %}",
    "generation": "{% for m in messages %}{% generation %}{{ m['content'] }}{% endgeneration %};{% endfor %}",
    "tojson": "{{ messages | tojson }} {{ messages[0] | tojson(indent=2) }}",
    "namespace": "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}"
    "{{ ns.n }}",
    "prompt": "{% if add_generation_prompt %}assistant:{% endif %}{{ tools is none }}{{ documents is none }}",
    "undefined": "a{{ nothing }}{% if date_string is not defined %}b{% endif %}",
}


@pytest.mark.parametrize("source", SOURCES.values(), ids=SOURCES)
def test_renders_as_transformers_does(source: str) -> None:
    expected, _ = render_jinja_template(
        conversations=[[{"role": m.role, "content": m.content} for m in MESSAGES]],
        chat_template=source,
        add_generation_prompt=True,
        bos_token="<s>",
    )
    assert ChatTemplate(source, {"bos_token": "<s>"}).render(CHAT, NOON_MS) == expected[0]


def test_the_clock_is_the_time_of_submit_in_utc(monkeypatch: pytest.MonkeyPatch) -> None:
    template = ChatTemplate("{{ strftime_now('%d %b %Y %H:%M') }}", {})
    for zone in ("UTC", "Asia/Tokyo", "America/Lima"):
        monkeypatch.setenv("TZ", zone)
        time.tzset()
        assert template.render(CHAT, NOON_MS) == "02 Jan 2026 23:59"
    monkeypatch.undo()
    time.tzset()


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[7]['content'] | trim }}{{ messages[7].x.y }}", "messages|undefined|no element"),
        ("{{ messages[0]['content'] + 1 }}", "str"),
        ("{{ 1 // 0 }}", "zero"),
        ("{{ messages.__class__.__mro__ }}{{ messages.append(1) }}", "unsafe|not safely"),
    ],
)
def test_a_template_that_fails_is_an_invalid_job(source: str, message: str) -> None:
    with pytest.raises(InvalidJob, match=f"chat template does not take these messages: .*({message})"):
        ChatTemplate(source, {}).render(CHAT, 0)
