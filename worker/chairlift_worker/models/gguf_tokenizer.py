"""A GGUF file's vocabulary as transformers' tokenizer.json and tokenizer_config.json.

Two kinds exist: `gpt2`, byte-level BPE with its merges listed and its pre-tokenizer named; and `llama`,
SentencePiece BPE, whose merges follow from the pieces' scores.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from chairlift_client.errors import ModelError
from chairlift_worker.models.gguf_file import GgufFile

_CONTROL, _USER_DEFINED = 3, 4
"""Token types: a control token is never in text; a user-defined one is, and is never split."""
_END_OF_TURN = ("<|im_end|>", "<|eot_id|>", "<end_of_turn>", "<|end|>")
"""Control tokens that end an answer whatever the file's metadata says."""
_LLAMA3_NAMES = ("llama-bpe", "llama3", "llama-v3")
_DIGIT_BY_DIGIT = ("smollm", "starcoder", "refact", "command-r")
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_TAIL = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"


def tokenizer_of(file: GgufFile) -> Tokenizer:
    """The tokenizer; ModelError naming its kind or pre-tokenizer when that is not known."""
    kind = file.text("tokenizer.ggml.model")
    if kind == "gpt2":
        tokenizer = _byte_level(file)
    elif kind == "llama":
        tokenizer = _sentencepiece(file)
    else:
        raise ModelError(f"GGUF tokenizer {kind!r} is not supported (known: gpt2, llama)")
    _add_whole_tokens(file, tokenizer)
    _add_begin_and_end(file, tokenizer)
    return tokenizer


def tokenizer_config_of(file: GgufFile) -> dict[str, object]:
    """The entries of tokenizer_config.json, the chat template among them."""
    tokens = file.texts("tokenizer.ggml.tokens")
    config: dict[str, object] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": file.integer(f"{file.architecture}.context_length"),
        "add_bos_token": _adds(file, "bos"),
        "add_eos_token": _adds(file, "eos"),
    }
    for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        if file.has(f"tokenizer.ggml.{key}_token_id"):
            config[f"{name}_token"] = tokens[file.integer(f"tokenizer.ggml.{key}_token_id")]
    if file.has("tokenizer.chat_template"):
        config["chat_template"] = file.text("tokenizer.chat_template")
    return config


def end_token_ids(file: GgufFile) -> list[int]:
    """The ids that end an output, the metadata's own first."""
    keys = [f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom")]
    found = [file.integer(key) for key in keys if file.has(key)]
    types = file.numbers("tokenizer.ggml.token_type")
    tokens = enumerate(file.texts("tokenizer.ggml.tokens"))
    found += [index for index, token in tokens if token in _END_OF_TURN and types[index] == _CONTROL]
    return list(dict.fromkeys(found))


def _byte_level(file: GgufFile) -> Tokenizer:
    name = file.text("tokenizer.ggml.pre", "default")
    merges = [_merge(line) for line in file.texts("tokenizer.ggml.merges")]
    # Llama 3 takes a word that is in the vocabulary whole, even where no merges lead to it.
    model = models.BPE(_vocabulary(file), merges, ignore_merges=name in _LLAMA3_NAMES)
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = _pre_tokenizer(name)
    tokenizer.decoder = decoders.ByteLevel()
    if name == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    return tokenizer


def _pre_tokenizer(name: str) -> pre_tokenizers.PreTokenizer:
    if name == "gpt-2":
        return pre_tokenizers.ByteLevel(add_prefix_space=False)
    if name in _DIGIT_BY_DIGIT:
        digits = pre_tokenizers.Digits(individual_digits=True)
        return pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    if name in _LLAMA3_NAMES:
        return _split_by(rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}{{1,3}}|{_TAIL}")
    if name == "qwen2":
        return _split_by(rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}|{_TAIL}")
    known = ", ".join(("gpt-2", "qwen2", *_DIGIT_BY_DIGIT, *_LLAMA3_NAMES))
    raise ModelError(f"GGUF pre-tokenizer {name!r} is not supported (known: {known})")


def _split_by(pattern: str) -> pre_tokenizers.PreTokenizer:
    split = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def _sentencepiece(file: GgufFile) -> Tokenizer:
    tokens = file.texts("tokenizer.ggml.tokens")
    vocabulary = _vocabulary(file)
    merges = _merges_by_score(vocabulary, file.numbers("tokenizer.ggml.scores"))
    unknown = tokens[file.integer("tokenizer.ggml.unknown_token_id", 0)]
    model = models.BPE(vocabulary, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    tokenizer = Tokenizer(model)
    steps: list[normalizers.Normalizer] = [normalizers.Replace(" ", "▁")]
    undo: list[decoders.Decoder] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if file.flag("tokenizer.ggml.add_space_prefix", True):
        steps.insert(0, normalizers.Prepend("▁"))
        undo.append(decoders.Strip(" ", 1, 0))
    tokenizer.normalizer = normalizers.Sequence(steps)
    tokenizer.decoder = decoders.Sequence(undo)
    return tokenizer


def _merges_by_score(vocabulary: dict[str, int], scores: Seq[float]) -> list[tuple[str, str]]:
    """Every way to make a piece of two others, best first: SentencePiece merges by the result's score."""
    merges: list[tuple[str, str]] = []
    for piece in sorted(vocabulary, key=lambda piece: (-scores[vocabulary[piece]], vocabulary[piece])):
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            if left in vocabulary and right in vocabulary:
                merges.append((left, right))
    return merges


def _add_whole_tokens(file: GgufFile, tokenizer: Tokenizer) -> None:
    """Tokens that are matched before anything else, in the order of their ids."""
    types = file.numbers("tokenizer.ggml.token_type")
    whole = [
        AddedToken(token, special=types[index] == _CONTROL, normalized=False)
        for index, token in enumerate(file.texts("tokenizer.ggml.tokens"))
        if types[index] in (_CONTROL, _USER_DEFINED)
    ]
    tokenizer.add_tokens(whole)


def _add_begin_and_end(file: GgufFile, tokenizer: Tokenizer) -> None:
    tokens = file.texts("tokenizer.ggml.tokens")
    ids = {
        name: file.integer(f"tokenizer.ggml.{name}_token_id") for name in ("bos", "eos") if _adds(file, name)
    }
    if not ids:
        return
    begin = [tokens[ids["bos"]]] if "bos" in ids else []
    end = [tokens[ids["eos"]]] if "eos" in ids else []
    tokenizer.post_processor = processors.TemplateProcessing(
        single=[*begin, "$A", *end],
        pair=[
            *begin,
            "$A",
            *end,
            *(f"{token}:1" for token in begin),
            "$B:1",
            *(f"{token}:1" for token in end),
        ],
        special_tokens=[(tokens[index], index) for index in ids.values()],
    )


def _adds(file: GgufFile, name: str) -> bool:
    """Whether text is wrapped in bos or eos; the entry's absence means what llama.cpp takes it to mean."""
    default = name == "bos" and file.text("tokenizer.ggml.model") == "llama"
    return file.flag(f"tokenizer.ggml.add_{name}_token", default)


def _vocabulary(file: GgufFile) -> dict[str, int]:
    return {token: index for index, token in enumerate(file.texts("tokenizer.ggml.tokens"))}


def _merge(line: str) -> tuple[str, str]:
    left, _, right = line.partition(" ")
    return left, right
