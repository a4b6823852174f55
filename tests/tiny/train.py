"""Train the tiny Llama that the tests run on: `PYTHONPATH=tests python -m tiny.train`.

Everything follows from the seed: corpus, tokenizer, first weights, order of the batches. One core, minutes.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from tiny.corpus import Document, draw_document

SEED = 20240229
VOCABULARY_SIZE = 640
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TOKENS_PER_BATCH = 2048
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def train_tokenizer(num_documents: int) -> PreTrainedTokenizerFast:
    """Learn a byte-level BPE from the corpus: any text survives the round trip."""
    rng = Random(SEED)
    documents = (draw_document(rng) for _ in range(num_documents))
    texts = (
        text
        for document in documents
        for text in (document.text, *(message.content for message in document.messages))
    )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY_SIZE,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=None,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=1024,
    )


def build_model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """Build the untrained model: grouped heads and tied embeddings, as the large ones have."""
    end_of_text, _, end_of_turn = tokenizer.convert_tokens_to_ids(list(SPECIAL_TOKENS))
    eos_token_ids = [end_of_turn, end_of_text]
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=96,
        intermediate_size=224,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=24,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=eos_token_ids,
        pad_token_id=end_of_text,
    )
    torch.manual_seed(SEED)
    model = LlamaForCausalLM(config)
    model.generation_config = GenerationConfig(eos_token_id=eos_token_ids, pad_token_id=end_of_text)
    return model


def encode_document(tokenizer: PreTrainedTokenizerFast, document: Document) -> list[int]:
    """Encode a document, closed by the end of text."""
    text = document.text
    if document.messages:
        chat = [message._asdict() for message in document.messages]
        text = tokenizer.apply_chat_template(chat, tokenize=False)
    token_ids: list[int] = tokenizer.encode(text + SPECIAL_TOKENS[0], add_special_tokens=False)
    return token_ids


def pack_row(tokenizer: PreTrainedTokenizerFast, rng: Random, length: int) -> list[int]:
    """Fill one row with whole documents, the last one cut: each begins as a prompt does, at position 0."""
    row: list[int] = []
    while len(row) < length:
        row += encode_document(tokenizer, draw_document(rng))
    return row[:length]


def draw_batches(tokenizer: PreTrainedTokenizerFast, num_steps: int) -> Iterator[Tensor]:
    """Yield one batch of token ids [rows, length] per step: short rows first, the full context at the end."""
    rng = Random(SEED + 1)
    for step in range(num_steps):
        length = 256 if step < 0.6 * num_steps else 1024
        rows = [pack_row(tokenizer, rng, length) for _ in range(TOKENS_PER_BATCH // length)]
        yield torch.tensor(rows)


def learning_rate(step: int, num_steps: int, peak: float = 4e-3) -> float:
    """Warm up linearly over the first 5 %, then fall along a cosine to a fiftieth of the peak."""
    warmup = max(1, num_steps // 20)
    if step < warmup:
        return peak * (step + 1) / warmup
    progress = (step - warmup) / max(1, num_steps - warmup)
    return peak * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * progress)))


def train(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, num_steps: int) -> list[float]:
    """Train in place and return the loss of every step, in nats per token."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, betas=(0.9, 0.98), weight_decay=0.05)
    losses: list[float] = []
    begin = time.monotonic()
    model.train()
    for step, token_ids in enumerate(draw_batches(tokenizer, num_steps)):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, num_steps)
        loss = model(input_ids=token_ids, labels=token_ids, use_cache=False).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
        if (step + 1) % 50 == 0 or step + 1 == num_steps:
            recent = sum(losses[-50:]) / len(losses[-50:])
            print(f"step {step + 1:5d}  loss {recent:.4f}  {time.monotonic() - begin:4.0f} s", flush=True)
    model.eval()
    return losses


def train_and_save(folder: Path, num_steps: int, num_tokenizer_documents: int = 4000) -> list[float]:
    """Train tokenizer and model, save both in `folder` and return the losses."""
    tokenizer = train_tokenizer(num_tokenizer_documents)
    model = build_model(tokenizer)
    print(f"{model.num_parameters()} parameters, {len(tokenizer)} tokens")
    losses = train(model, tokenizer, num_steps)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder, save_jinja_files=False)
    return losses


def main() -> None:
    """Train from the command line; by default into the folder that the tests read."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path(__file__).parent / "model")
    parser.add_argument("--steps", type=int, default=4000)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    train_and_save(arguments.folder, arguments.steps)


if __name__ == "__main__":
    main()
