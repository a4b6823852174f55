"""From what a producer sends to token ids, and back to text."""

from __future__ import annotations

import re
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any

import jinja2
from tokenizers import AddedToken, Tokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from chairlift_client.errors import InvalidJob, ModelError
from chairlift_client.protocol import JobBody, Message
from chairlift_worker.models.chat import Chat, make_chat
from chairlift_worker.models.control_tokens import ControlTokens, Piece, choose_marker
from chairlift_worker.models.template import ChatTemplate
from chairlift_worker.models.template_apart import render_apart

_ROLE = re.compile(r"[A-Za-z0-9_.-]{1,64}")


class ChatTokenizer:
    """A model's tokenizer and chat template. Nothing in it changes, so any thread may use it.

    Users write text: what looks like a control token in a prompt or a message is tokenized as the
    characters it consists of, and only the chat template's own control tokens become such.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast, vocab_size: int) -> None:
        """`vocab_size`: how many ids the model knows, which need not be what the tokenizer has."""
        self._vocab_size = vocab_size
        self._tokenizer = _without_limits(tokenizer.backend_tokenizer)
        self._text_tokenizer = _without_limits(tokenizer.backend_tokenizer)
        self._text_tokenizer.encode_special_tokens = True
        added = self._tokenizer.get_added_tokens_decoder()
        self._controls: dict[str, tuple[int, AddedToken]] = {
            token.content: (token_id, token) for token_id, token in added.items() if token.special
        }
        self._control_tokens = ControlTokens(self._controls)
        self._special_tokens = _special_tokens(tokenizer)
        self._template = _template(tokenizer, self._special_tokens)

    @classmethod
    def load(cls, folder: Path, *, vocab_size: int) -> ChatTokenizer:
        """The tokenizer that is stored with a model. Runs no code from the folder."""
        try:
            tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        except (OSError, ValueError, KeyError, TypeError, ImportError) as error:
            raise ModelError(f"{folder}: no tokenizer that transformers can read: {error}") from error
        if not getattr(tokenizer, "is_fast", False):
            raise ModelError(f"{folder}: {type(tokenizer).__name__} has no fast version (tokenizer.json)")
        return cls(tokenizer, vocab_size)

    @property
    def backend(self) -> Tokenizer:
        """The tokenizer proper; not to be changed."""
        return self._tokenizer

    @property
    def special_token_ids(self) -> frozenset[int]:
        """Ids of the control tokens."""
        return frozenset(token_id for token_id, _ in self._controls.values())

    def prompt_ids(self, body: JobBody, submitted_ms: int) -> tuple[int, ...]:
        """The prompt of a job, given as messages, text or ids; InvalidJob for one that cannot run."""
        if body.messages is not None:
            return self.render(
                body.messages, submitted_ms, tools=body.tools, chat_template=body.chat_template
            )
        if body.prompt is not None:
            return self.encode_prompt(body.prompt)
        return self.check_ids(body.token_ids or ())

    def encode_prompt(self, text: str) -> tuple[int, ...]:
        """Plain text, with what the tokenizer puts around by default (often a BOS)."""
        if not text:
            raise InvalidJob("prompt is empty (0 characters)")
        return self.check_ids(_ids(self._text_tokenizer, text, with_special_tokens=True))

    def render(
        self,
        messages: Seq[Message],
        submitted_ms: int,
        *,
        tools: Seq[dict[str, Any]] | None = None,
        chat_template: str | None = None,
    ) -> tuple[int, ...]:
        """Chat messages through the template, whose clock shows `submitted_ms` (ms since the epoch, UTC).

        `chat_template` is a user's own, in place of the model's; it is rendered apart, which takes a moment.
        """
        if self._template is None and chat_template is None:
            raise InvalidJob(
                "messages need a chat template and this model has none: "
                "send prompt, token_ids or a chat_template"
            )
        if not messages:
            raise InvalidJob("messages is empty (0 messages)")
        _check_roles(messages)
        chat = make_chat(messages, tools)
        marker = choose_marker(chat.strings())
        disarmed = chat.map_strings(lambda text: self._control_tokens.disarm(text, marker))
        rendered = self._render(disarmed, submitted_ms, chat_template)
        if disarmed == chat:
            return self.check_ids(_ids(self._tokenizer, rendered))
        return self.check_ids(self._encode_pieces(list(self._control_tokens.cut(rendered, marker))))

    def _render(self, chat: Chat, submitted_ms: int, chat_template: str | None) -> str:
        if chat_template is not None:
            return render_apart(chat_template, self._special_tokens, chat, submitted_ms)
        assert self._template is not None
        return self._template.render(chat, submitted_ms)

    def check_ids(self, token_ids: Iterable[int]) -> tuple[int, ...]:
        """The ids as they are; InvalidJob if there are none or the model does not know one."""
        checked = tuple(token_ids)
        if not checked:
            raise InvalidJob("the prompt has 0 tokens")
        for position, token_id in enumerate(checked):
            if not 0 <= token_id < self._vocab_size:
                raise InvalidJob(
                    f"token {position} of the prompt has id {token_id}, "
                    f"the model's vocabulary has {self._vocab_size} ids"
                )
        return checked

    def bad_words(self, words: Iterable[str]) -> tuple[tuple[int, ...], ...]:
        """The runs of tokens that spell each word at the beginning of a text, and after a space."""
        spelled = (tuple(_ids(self._text_tokenizer, text)) for word in words for text in (word, f" {word}"))
        return tuple(dict.fromkeys(ids for ids in spelled if ids))

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        """The text of the ids; a character that is cut in half becomes U+FFFD."""
        return self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)

    def _encode_pieces(self, pieces: list[Piece]) -> Iterable[int]:
        for index, piece in enumerate(pieces):
            if piece.is_control:
                yield self._controls[piece.text][0]
            else:
                text = self._trim(piece.text, pieces[index - 1 : index], pieces[index + 1 : index + 2])
                yield from _ids(self._text_tokenizer, text)

    def _trim(self, text: str, before: list[Piece], after: list[Piece]) -> str:
        """A control token may swallow the blanks beside it."""
        if before and self._controls[before[0].text][1].rstrip:
            text = text.lstrip()
        if after and self._controls[after[0].text][1].lstrip:
            text = text.rstrip()
        return text


def _check_roles(messages: Seq[Message]) -> None:
    for index, message in enumerate(messages):
        if not _ROLE.fullmatch(message.role):
            raise InvalidJob(f"messages[{index}].role is {message.role[:64]!r}: letters, digits, _ . - only")


def _ids(tokenizer: Tokenizer, text: str, *, with_special_tokens: bool = False) -> list[int]:
    """The ids of a text, as a batch of one: `encode` holds the interpreter lock from beginning to end, and a
    prompt of a megabyte would keep engine and leases waiting for seconds; a batch lets it go."""
    ids: list[int] = tokenizer.encode_batch_fast([text], add_special_tokens=with_special_tokens)[0].ids
    return ids


def _without_limits(backend: Tokenizer) -> Tokenizer:
    """A copy that neither cuts nor pads, whatever its file asks for."""
    tokenizer: Tokenizer = Tokenizer.from_str(backend.to_str())
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _special_tokens(tokenizer: PreTrainedTokenizerFast) -> dict[str, str]:
    """By the names that templates know them by."""
    tokens = tokenizer.special_tokens_map.items()
    return {name: str(token) for name, token in tokens if isinstance(token, str | AddedToken)}


def _template(tokenizer: PreTrainedTokenizerFast, special_tokens: dict[str, str]) -> ChatTemplate | None:
    source: Any = tokenizer.chat_template
    if isinstance(source, dict):
        source = source.get("default")
    if source is None:
        return None
    try:
        return ChatTemplate(source, special_tokens)
    except jinja2.TemplateError as error:
        raise ModelError(f"the model's chat template is not valid: {error}") from error
