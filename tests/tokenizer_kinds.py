"""The kinds of tokenizers that detokenization has to be right for, and one that counts."""

from __future__ import annotations

import json
from functools import cache

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from tiny_model import TINY_MODEL

TEXTS = (
    "The chairlift never stops to fill a cabin. Riders queue, sit down, and get off where they like.",
    "  two leading spaces, then   three inside , and one before a comma .",
    "çğışöü İstanbul'da kar yağıyor; teleferik çalışıyor.",
    "漢字と仮名。滑雪纜車從不停下來。똻",
    "😊 👩‍👩‍👧 🏔️ done",
    "مرحبا بالعالم",
    "def lift(x):\n    return x + 1\n\n\treturn\r\n",
)


class CountingDecoder:
    """A tokenizer that notes how much it is asked to decode."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.lengths: list[int] = []

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        self.lengths.append(len(ids))
        text: str = self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)
        return text


@cache
def byte_level() -> Tokenizer:
    """The byte-level BPE of the tiny model."""
    return Tokenizer.from_file(str(TINY_MODEL / "tokenizer.json"))


@cache
def sentence_piece_like() -> Tokenizer:
    """BPE with a space marker and byte fallback, decoding like Llama 2's: the first space is dropped."""
    trained = Tokenizer(models.BPE())
    trained.normalizer = _marked_spaces()
    trainer = trainers.BpeTrainer(vocab_size=160, show_progress=False, initial_alphabet=["▁"])
    # Only Latin text is trained on, so all else is spelled in bytes.
    trained.train_from_iterator(TEXTS[:2], trainer)
    model = json.loads(trained.to_str())["model"]
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *model["vocab"]]
    tokenizer = Tokenizer(
        models.BPE(
            vocab={piece: index for index, piece in enumerate(pieces)},
            merges=[tuple(merge) for merge in model["merges"]],
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    tokenizer.normalizer = _marked_spaces()
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in ("<unk>", "<s>", "</s>")])
    return tokenizer


@cache
def metaspace() -> Tokenizer:
    """Unigram-style spaces by pre-tokenizer, as T5 and its kin have them."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    special = ["<unk>", "<s>", "</s>"]
    trainer = trainers.BpeTrainer(vocab_size=400, show_progress=False, special_tokens=special)
    tokenizer.train_from_iterator(TEXTS, trainer)
    return tokenizer


def _marked_spaces() -> normalizers.Normalizer:
    return normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
