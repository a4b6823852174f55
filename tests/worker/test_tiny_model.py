"""The tiny Llama is what other tests take it for: small, fluent, multilingual, and able to end by itself."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tiny.corpus import draw_document
from tiny.train import train_and_save
from tiny_model import TINY_MODEL, TinyPrompt, load_prompts

MAX_NEW_TOKENS = 200
TIE_MARGIN = 1e-4  # logits
STRINGS = (
    "Once upon a time, there was a little fox.",
    "Küçük bir kurbağa varmış. Adı Işıl imiş; çok gülmüş, ğüşöç İĞÜŞÖÇ.",
    "从前有一只小熊猫，名字叫豆豆。",
    "كان يا ما كان، كان هناك أرنب صغير؟",
    "🦊🐼 👩‍👩‍👧‍👦 🇹🇷 ❄️",
    "  two  spaces\n\n\ttab and\r\nlines ",
    "ひらがな Ελλάδα ไทย 𝄞 \x00\x7f",
)


class Answer(NamedTuple):
    """A greedy answer and how clear each of its choices was."""

    prompt: TinyPrompt
    token_ids: list[int]
    margins: list[float]  # of the top logit over the second


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(TINY_MODEL)


@pytest.fixture(scope="module")
def model() -> Any:
    return AutoModelForCausalLM.from_pretrained(TINY_MODEL)


def encode_prompt(tokenizer: Any, prompt: TinyPrompt) -> list[int]:
    text = prompt.prompt
    if prompt.messages:
        text = tokenizer.apply_chat_template(prompt.chat(), add_generation_prompt=True, tokenize=False)
    token_ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
    return token_ids


@pytest.fixture(scope="module")
def answers(model: Any, tokenizer: Any) -> list[Answer]:
    return [answer_greedily(model, prompt, encode_prompt(tokenizer, prompt)) for prompt in load_prompts()]


def answer_greedily(model: Any, prompt: TinyPrompt, token_ids: list[int]) -> Answer:
    output = model.generate(
        torch.tensor([token_ids]),
        attention_mask=torch.ones(1, len(token_ids), dtype=torch.long),
        max_new_tokens=MAX_NEW_TOKENS,
        do_sample=False,
        return_dict_in_generate=True,
        output_logits=True,
    )
    top = torch.cat(output.logits).topk(2).values  # [new tokens, 2]
    return Answer(prompt, output.sequences[0, len(token_ids) :].tolist(), (top[:, 0] - top[:, 1]).tolist())


def test_the_weights_are_small_and_what_the_configuration_says(model: Any) -> None:
    config = model.config
    assert (TINY_MODEL / "model.safetensors").stat().st_size <= 2_000_000
    assert sum(path.stat().st_size for path in TINY_MODEL.iterdir()) <= 2_000_000
    assert model.dtype == torch.float32
    assert config.model_type == "llama"
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (4, 2, 24)
    assert config.num_hidden_layers == 4
    assert config.max_position_embeddings == 1024
    assert config.tie_word_embeddings


def test_both_end_tokens_end_a_generation(model: Any, tokenizer: Any) -> None:
    ends = tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"])
    assert model.config.eos_token_id == ends
    assert model.generation_config.eos_token_id == ends
    assert tokenizer.eos_token_id == ends[0]
    assert len(tokenizer) == model.config.vocab_size


@pytest.mark.parametrize("text", STRINGS)
def test_any_text_survives_the_round_trip(tokenizer: Any, text: str) -> None:
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(token_ids) == text
    if not text.isascii():
        assert any("\ufffd" in tokenizer.decode([token_id]) for token_id in token_ids), "no split letter"


def test_a_chat_is_laid_out_as_chatml(tokenizer: Any) -> None:
    chat = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hi"}]
    text = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    expected = (
        "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
    assert text == expected


def test_the_prompts_are_fifty_of_mixed_length_and_language(tokenizer: Any) -> None:
    prompts = load_prompts()
    lengths = sorted(len(encode_prompt(tokenizer, prompt)) for prompt in prompts)
    assert len({prompt.id for prompt in prompts}) == len(prompts) == 50
    assert {prompt.lang for prompt in prompts} == {"en", "tr", "zh", "ar", "mul"}
    assert lengths[0] <= 3
    assert 300 <= lengths[-1] <= 500


def test_the_answers_end_by_themselves_with_few_ties(model: Any, answers: list[Answer]) -> None:
    ends = model.config.eos_token_id
    ended = [answer for answer in answers if answer.token_ids[-1] in ends]
    margins = [margin for answer in answers for margin in answer.margins]
    num_ties = sum(margin < TIE_MARGIN for margin in margins)
    lengths = sorted(len(answer.token_ids) for answer in answers)
    print(
        f"{len(ended)} of {len(answers)} end within {MAX_NEW_TOKENS} tokens;",
        f"median {lengths[len(lengths) // 2]}",
    )
    print(
        f"{num_ties} near ties (< {TIE_MARGIN}) in {len(margins)} tokens, smallest margin {min(margins):.2g}"
    )
    assert len(ended) >= 45
    assert num_ties <= 3


def test_the_answers_are_sensible(tokenizer: Any, answers: list[Answer]) -> None:
    texts = {
        answer.prompt.id: tokenizer.decode(answer.token_ids, skip_special_tokens=True) for answer in answers
    }
    assert texts["tiny-01"].startswith("Hi there!")
    assert "meadow" in texts["tiny-09"]
    assert texts["tiny-16"].startswith("🦊 is a fox.")
    assert "小红" in texts["tiny-38"]
    assert "Gökten" in texts["tiny-34"] or "İyi geceler" in texts["tiny-34"]
    assert len(set(texts.values())) >= 45
    assert not any("\ufffd" in text for text in texts.values())


def test_answers_hold_letters_split_over_tokens(tokenizer: Any, answers: list[Answer]) -> None:
    split = [
        answer.prompt.id
        for answer in answers
        if any("\ufffd" in tokenizer.decode([token_id]) for token_id in answer.token_ids)
    ]
    assert len(split) >= 15


def test_the_corpus_follows_from_its_seed() -> None:
    def draw() -> list[Any]:
        rng = Random(5)
        return [draw_document(rng) for _ in range(20)]

    documents = draw()
    assert documents == draw()
    assert any(document.text for document in documents)
    assert any(document.messages for document in documents)


def test_a_short_training_learns_and_can_be_repeated(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    losses = train_and_save(tmp_path / "first", num_steps=6, num_tokenizer_documents=300)
    again = train_and_save(tmp_path / "second", num_steps=6, num_tokenizer_documents=300)
    assert "loss" in capsys.readouterr().out
    assert losses[-1] < losses[0] - 0.1
    assert losses == again
    for name in ("model.safetensors", "tokenizer.json"):
        assert (tmp_path / "first" / name).read_bytes() == (tmp_path / "second" / name).read_bytes()
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "first").config.vocab_size == 640
    assert {path.name for path in (tmp_path / "first").iterdir()} == {
        path.name for path in TINY_MODEL.iterdir()
    }
