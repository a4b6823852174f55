"""Text piece by piece with the tokenizers of real models, in many languages.

SmolLM2's comes with its model. Others are read from a folder that TOKENIZERS names, each in a sub-folder as
tokenizer.json; nothing is downloaded for them. The texts are those of CHAIRLIFT_DATA.
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from time import perf_counter
from typing import NamedTuple

import pytest
from tokenizers import Tokenizer

from chairlift_worker.demo.model import cache_folder, fetch
from chairlift_worker.engine.detokenizer import MAX_INCOMPLETE, MAX_WINDOW, REPLACEMENT, Detokenizer
from chairlift_worker.models.gguf import convert_gguf
from tokenizer_kinds import CountingDecoder

pytestmark = pytest.mark.slow

LONGEST = 8192
PART = 1024


class Text(NamedTuple):
    source: str
    text: str


def stored() -> dict[str, Path]:
    """The tokenizers there are besides SmolLM2's."""
    folder = os.environ.get("TOKENIZERS")
    found = () if folder is None else sorted(Path(folder).glob("*/tokenizer.json"))
    return {path.parent.name: path for path in found}


@pytest.fixture(scope="module", params=["smollm2", *stored()])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    if request.param != "smollm2":
        return Tokenizer.from_file(str(stored()[request.param]))
    folder = convert_gguf(fetch(cache_folder(), lambda _part, _what: None), cache_folder())
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


@pytest.fixture(scope="module")
def texts() -> list[Text]:
    if "CHAIRLIFT_DATA" not in os.environ:
        pytest.skip("CHAIRLIFT_DATA names no folder with multilingual/")
    data = Path(os.environ["CHAIRLIFT_DATA"]) / "multilingual"
    naughty = json.loads((data / "blns.json").read_text())
    rights = [json.loads(line) for line in (data / "udhr.jsonl").read_text().splitlines()]
    emoji = (data / "unicode_emoji-test.txt").read_text().splitlines()
    return [
        *(Text("naughty", text) for text in naughty),
        *(Text("emoji", line) for line in emoji),
        *(Text(row["lang"], row["text"]) for row in rights),
    ]


def pieces(tokenizer: Tokenizer, token_ids: list[int]) -> Iterator[str]:
    detokenizer = Detokenizer(tokenizer)
    for token_id in token_ids:
        yield detokenizer.append(token_id)
    yield detokenizer.flush()


def test_joined_pieces_are_the_decoded_whole(tokenizer: Tokenizer, texts: list[Text]) -> None:
    num_tokens = num_same = 0
    for source, text in texts:
        token_ids = tokenizer.encode(text, add_special_tokens=False).ids
        whole = tokenizer.decode(token_ids)
        assert "".join(pieces(tokenizer, token_ids)) == whole, (source, text[:100])
        num_tokens += len(token_ids)
        num_same += whole == text
    print(f"{len(texts)} texts, {num_tokens} tokens; {num_same} texts decode to themselves")


def test_text_is_told_as_soon_as_it_is_whole(tokenizer: Tokenizer, texts: list[Text]) -> None:
    """And what was told is never taken back: it is the beginning of the whole text."""
    for source, text in texts:
        token_ids = tokenizer.encode(text, add_special_tokens=False).ids
        final, told = tokenizer.decode(token_ids), ""
        for end, piece in enumerate(islice(pieces(tokenizer, token_ids), 300), start=1):
            told += piece
            assert final.startswith(told), (source, end)
            whole = tokenizer.decode(token_ids[:end])
            assert told == whole or whole.endswith(REPLACEMENT), (source, end)


def test_any_tokens_of_the_vocabulary(tokenizer: Tokenizer) -> None:
    """Tokens that no text encodes to: what is whole is told as the whole decode has it."""
    seed = random.randrange(2**32)
    print("seed", seed)
    rng = random.Random(seed)
    size, num_same = tokenizer.get_vocab_size(), 0
    for _ in range(2000):
        token_ids = [rng.randrange(size) for _ in range(rng.randint(1, 60))]
        whole, told = tokenizer.decode(token_ids), "".join(pieces(tokenizer, token_ids))
        num_same += told == whole
        # Byte fallback is the exception: complete characters of a broken run were told already.
        assert told == whole or told.count(REPLACEMENT) < whole.count(REPLACEMENT), token_ids
    print(f"{num_same} of 2000 equal the whole decode to the last character")


def test_the_cost_of_a_token_is_flat(tokenizer: Tokenizer, texts: list[Text]) -> None:
    for source, text in texts:
        if source in ("naughty", "emoji"):
            continue
        once = tokenizer.encode(text, add_special_tokens=False).ids
        token_ids = (once * (LONGEST // len(once) + 1))[:LONGEST]
        counting = CountingDecoder(tokenizer)
        detokenizer = Detokenizer(counting)
        decoded, times = [], []
        for start in range(0, LONGEST, PART):
            began_at, before = perf_counter(), sum(counting.lengths)
            for token_id in token_ids[start : start + PART]:
                detokenizer.append(token_id)
            decoded.append((sum(counting.lengths) - before) / PART)
            times.append((perf_counter() - began_at) / PART * 1e6)
        assert max(counting.lengths) <= MAX_WINDOW + MAX_INCOMPLETE, source
        assert max(decoded) <= 1.5 * MAX_WINDOW, (source, decoded)
        print(f"{source}: {times[0]:.1f} µs a token at first, {times[-1]:.1f} µs after {LONGEST - PART}")
