"""Prompts to ids: equal to transformers' own, except that users cannot write control tokens."""

from __future__ import annotations

import json
import shutil
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from chairlift_client.errors import InvalidJob, ModelError
from chairlift_client.protocol import JobBody, Message
from chairlift_worker.models.tokenizer import ChatTokenizer
from tiny_model import TINY_MODEL, load_prompts

VOCAB_SIZE = 640
IM_START, IM_END = 1, 2


def user(content: str) -> tuple[Message, ...]:
    return (Message(role="user", content=content),)


def save_variant(
    folder: Path, *, config: dict[str, Any] | None = None, flags: dict[str, Any] | None = None
) -> Path:
    """The tiny model's tokenizer with other settings; `flags` go to every control token."""
    for name in ("tokenizer.json", "tokenizer_config.json", "config.json"):
        shutil.copy(TINY_MODEL / name, folder / name)
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | (config or {})))
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text())
    for token in content["added_tokens"]:
        token |= flags or {}
    path.write_text(json.dumps(content))
    return folder


@pytest.fixture(scope="module")
def tokenizer() -> ChatTokenizer:
    return ChatTokenizer.load(TINY_MODEL, vocab_size=VOCAB_SIZE)


@pytest.fixture(scope="module")
def oracle() -> Any:
    return AutoTokenizer.from_pretrained(TINY_MODEL)


def oracle_chat(oracle: Any, messages: tuple[Message, ...]) -> list[int]:
    chat = [{"role": message.role, "content": message.content} for message in messages]
    ids: list[int] = oracle.apply_chat_template(chat, add_generation_prompt=True)["input_ids"]
    return ids


def test_real_prompts_equal_transformers(tokenizer: ChatTokenizer, oracle: Any) -> None:
    for prompt in load_prompts():
        if prompt.prompt is not None:
            assert list(tokenizer.encode_prompt(prompt.prompt)) == oracle(prompt.prompt)["input_ids"]
        else:
            messages = tuple(Message(role=turn["role"], content=turn["content"]) for turn in prompt.chat())
            assert list(tokenizer.render(messages, 0)) == oracle_chat(oracle, messages)


@pytest.mark.parametrize("content", ["a <", "|> b", "> a <|", "x<|im_end|", " <|im_start", "end|>", "<"])
def test_parts_of_control_tokens_change_nothing(tokenizer: ChatTokenizer, oracle: Any, content: str) -> None:
    """They go the careful way, whose ids are those of the whole text."""
    assert list(tokenizer.render(user(content), 0)) == oracle_chat(oracle, user(content))


@pytest.mark.parametrize("flags", [{"rstrip": True}, {"lstrip": True}, {"lstrip": True, "rstrip": True}])
def test_control_tokens_that_swallow_blanks(tmp_path: Path, flags: dict[str, bool]) -> None:
    save_variant(tmp_path, flags=flags)
    tokenizer = ChatTokenizer.load(tmp_path, vocab_size=VOCAB_SIZE)
    oracle = AutoTokenizer.from_pretrained(tmp_path)
    for content in ("a < ", "  > b \n", " < ", "plain "):
        assert list(tokenizer.render(user(content), 0)) == oracle_chat(oracle, user(content))


pieces = st.sampled_from(
    ["<|im_end|>", "<|im_start|>", "<|endoftext|>", "<|", "|>", "im_end", "\n", " ", "a", "é", "你"]
)


@given(contents=st.lists(st.lists(pieces, max_size=6).map("".join), min_size=1, max_size=3))
def test_control_tokens_in_messages_are_text(tokenizer: ChatTokenizer, contents: list[str]) -> None:
    messages = tuple(Message(role="user", content=content) for content in contents)
    ids = tokenizer.render(messages, 0)
    assert [token for token in ids if token in tokenizer.special_token_ids] == [
        *[IM_START, IM_END] * len(contents),
        IM_START,
    ]
    text = "".join(f"<|im_start|>user\n{content}<|im_end|>\n" for content in contents)
    assert tokenizer.decode(list(ids), skip_special_tokens=False) == f"{text}<|im_start|>assistant\n"


def test_control_tokens_in_a_prompt_are_text(tokenizer: ChatTokenizer) -> None:
    ids = tokenizer.encode_prompt("a<|im_end|>b")
    assert not tokenizer.special_token_ids.intersection(ids)
    assert tokenizer.decode(list(ids)) == "a<|im_end|>b"


def test_a_prompt_gets_the_bos_that_the_tokenizer_adds(tmp_path: Path) -> None:
    save_variant(tmp_path)
    path = tmp_path / "tokenizer.json"
    content = json.loads(path.read_text())
    content["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<|im_start|>"]}},
    }
    content["truncation"] = {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0}
    path.write_text(json.dumps(content))
    tokenizer = ChatTokenizer.load(tmp_path, vocab_size=VOCAB_SIZE)
    ids = tokenizer.encode_prompt("Once upon a time, in a land far away")
    assert ids.count(1) == 1
    assert ids[0] == 1
    assert len(ids) > 3  # the file's truncation is not for us
    assert tokenizer.render(user("x"), 0).count(1) == 2  # no BOS but the template's own tokens


def test_the_three_forms_of_a_prompt(tokenizer: ChatTokenizer) -> None:
    by_text = tokenizer.prompt_ids(JobBody(prompt="one two"), 0)
    assert by_text == tokenizer.encode_prompt("one two")
    assert tokenizer.prompt_ids(JobBody(token_ids=by_text), 0) == by_text
    assert tokenizer.prompt_ids(JobBody(messages=user("one")), 0) == tokenizer.render(user("one"), 0)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (JobBody(prompt=""), r"prompt is empty \(0 characters\)"),
        (JobBody(token_ids=()), "0 tokens"),
        (JobBody(messages=()), r"messages is empty \(0 messages\)"),
        (JobBody(token_ids=(3, 640)), "token 1 of the prompt has id 640, the model's vocabulary has 640 ids"),
        (JobBody(token_ids=(-1,)), "token 0 of the prompt has id -1, the model's vocabulary has 640 ids"),
        (
            JobBody(messages=(Message(role="<|im_end|>", content="x"),)),
            r"messages\[0\]\.role is '<\|im_end\|>'",
        ),
    ],
)
def test_jobs_that_cannot_run(tokenizer: ChatTokenizer, body: JobBody, message: str) -> None:
    with pytest.raises(InvalidJob, match=message):
        tokenizer.prompt_ids(body, 0)


def test_ids_of_the_tokenizer_that_the_model_does_not_have() -> None:
    small = ChatTokenizer.load(TINY_MODEL, vocab_size=300)
    with pytest.raises(InvalidJob, match="vocabulary has 300 ids"):
        small.encode_prompt("Once upon a time there was a little girl")


def test_a_model_without_a_chat_template_takes_no_messages(tmp_path: Path) -> None:
    save_variant(tmp_path, config={"chat_template": None})
    tokenizer = ChatTokenizer.load(tmp_path, vocab_size=VOCAB_SIZE)
    with pytest.raises(InvalidJob, match="has none: send prompt, token_ids or a chat_template"):
        tokenizer.render(user("x"), 0)
    assert tokenizer.encode_prompt("x")


def test_the_template_refuses_and_knows_the_time(tmp_path: Path) -> None:
    refusal = "{% if messages|length > 1 %}{{ raise_exception('one message only') }}{% endif %}"
    source = refusal + "{{ strftime_now('%Y') }}"
    save_variant(tmp_path, config={"chat_template": source})
    tokenizer = ChatTokenizer.load(tmp_path, vocab_size=VOCAB_SIZE)
    assert tokenizer.decode(list(tokenizer.render(user("x"), 0))) == "1970"
    with pytest.raises(InvalidJob, match="one message only"):
        tokenizer.render(user("x") * 2, 0)


def test_folders_without_a_usable_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no tokenizer"):
        ChatTokenizer.load(tmp_path, vocab_size=VOCAB_SIZE)
    save_variant(tmp_path, config={"chat_template": "{% if %}"})
    with pytest.raises(ModelError, match="chat template is not valid"):
        ChatTokenizer.load(tmp_path, vocab_size=VOCAB_SIZE)


@pytest.mark.parametrize("as_chat", [False, True])
def test_a_long_prompt_lets_other_threads_run(tokenizer: ChatTokenizer, as_chat: bool) -> None:
    text = "the quick brown fox " * 20_000

    def tokenize() -> None:
        if as_chat:
            tokenizer.render(user(text), 0)
        else:
            tokenizer.encode_prompt(text)

    thread = threading.Thread(target=tokenize)
    began_at = last = time.monotonic()
    longest_s = 0.0
    thread.start()
    while thread.is_alive():
        thread.join(0.001)
        now = time.monotonic()
        longest_s, last = max(longest_s, now - last), now
    assert longest_s < 0.5 * (last - began_at)
