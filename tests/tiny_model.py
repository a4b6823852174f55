"""Where the tiny trained Llama lies, and the prompts that go with it (see tests/tiny/README.md)."""

from __future__ import annotations

from pathlib import Path

import msgspec

TINY_FOLDER = Path(__file__).parent / "tiny"
TINY_MODEL = TINY_FOLDER / "model"
"""A folder as transformers saves it: config, weights in safetensors, tokenizer with chat template."""


class TinyMessage(msgspec.Struct, frozen=True):
    """One turn of a prompt that is a chat."""

    role: str
    content: str


class TinyPrompt(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One of the 50 prompts: either a chat (`messages`) or plain text to be continued (`prompt`)."""

    id: str
    lang: str  # en, tr, zh, ar, or mul where several are mixed
    messages: tuple[TinyMessage, ...] | None = None
    prompt: str | None = None

    def __post_init__(self) -> None:
        if (self.messages is None) == (self.prompt is None):
            raise ValueError(f"prompt {self.id}: exactly one of messages and prompt must be given")

    def chat(self) -> list[dict[str, str]]:
        """Return the turns as a chat template takes them; empty for plain text."""
        return [{"role": message.role, "content": message.content} for message in self.messages or ()]


def load_prompts() -> list[TinyPrompt]:
    """Read the 50 prompts, in the order of the file."""
    lines = (TINY_FOLDER / "prompts.jsonl").read_bytes().splitlines()
    return [msgspec.json.decode(line, type=TinyPrompt) for line in lines]
