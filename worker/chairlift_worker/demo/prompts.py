"""The demo's jobs: real chat prompts of mixed length and language, each with the moment it is submitted."""

from __future__ import annotations

from importlib.resources import files

import msgspec


class DemoPrompt(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One job of the demo. `name` is the letter it has on the screen; `after_s` counts from the first job."""

    name: str
    lang: str
    after_s: float
    max_tokens: int
    temperature: float
    prompt: str


def load_prompts() -> list[DemoPrompt]:
    """All prompts in the order in which they are submitted."""
    lines = files(__package__).joinpath("prompts.jsonl").read_bytes().splitlines()
    prompts = [msgspec.json.decode(line, type=DemoPrompt) for line in lines]
    return sorted(prompts, key=lambda prompt: prompt.after_s)
