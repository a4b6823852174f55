"""The byte-level examples of docs/protocol.md are what the code writes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from chairlift_client.protocol import ChoiceDelta, LoggedEvent, Started, Tokens, Usage, decode_event, encode

PAGE = Path(__file__).parents[2] / "docs" / "protocol.md"
EXAMPLES: list[LoggedEvent] = [
    Started(1, 1, 1796095709445, "w1"),
    Tokens(2, 1, 7, (ChoiceDelta(0, 0, (5, 9), "Hi"),), Usage(3)),
]


def _hex_blocks() -> list[bytes]:
    return [bytes.fromhex(line) for line in re.findall(r"^    ((?:[0-9a-f]{2} ?)+)$", PAGE.read_text(), re.M)]


def test_every_example_of_the_page_is_known() -> None:
    assert len(_hex_blocks()) == len(EXAMPLES)


@pytest.mark.parametrize(("wire", "event"), list(zip(_hex_blocks(), EXAMPLES, strict=True)))
def test_examples(wire: bytes, event: LoggedEvent) -> None:
    assert decode_event(wire) == event
    if isinstance(event, Tokens):
        assert encode(event) == wire
