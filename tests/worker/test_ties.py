"""The judge of differences lets ties pass and nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from random_models import FAMILIES, VOCAB_SIZE, save_random_model
from ties import TIE, count_ties

PROMPT = [5, 6, 7]
NUM_TOKENS = 12
TIED_AT = 4
TWIN = VOCAB_SIZE - 1
WRONG = 3


@pytest.fixture
def oracle(tmp_path: Path) -> Any:
    """It cannot tell the token at `TIED_AT` of its own output from `TWIN`."""
    save_random_model(FAMILIES["llama"](), tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    plain = continue_greedily(model, PROMPT, NUM_TOKENS)
    assert {TWIN, WRONG}.isdisjoint(plain)
    with torch.no_grad():
        model.lm_head.weight[TWIN] = model.lm_head.weight[plain[TIED_AT]]
    return model


def continue_greedily(oracle: Any, text: list[int], num_tokens: int) -> list[int]:
    output: list[int] = []
    for _ in range(num_tokens):
        with torch.no_grad():
            output.append(int(oracle(torch.tensor([text + output])).logits[0, -1].argmax()))
    return output


def parted(oracle: Any, token_id: int) -> tuple[list[int], list[int]]:
    """A text that takes another token at `TIED_AT` and then goes the oracle's way; the oracle's own."""
    theirs = continue_greedily(oracle, PROMPT, NUM_TOKENS)
    head = [*theirs[:TIED_AT], token_id]
    return [*head, *continue_greedily(oracle, PROMPT + head, NUM_TOKENS - len(head))], theirs


def test_equal_texts(oracle: Any) -> None:
    theirs = continue_greedily(oracle, PROMPT, NUM_TOKENS)
    assert count_ties(oracle, PROMPT, theirs, theirs) == 0


def test_a_tie_and_what_follows_from_it(oracle: Any) -> None:
    ours, theirs = parted(oracle, TWIN)
    assert ours[TIED_AT + 1 :] != theirs[TIED_AT + 1 :]
    assert count_ties(oracle, PROMPT, ours, theirs) == 1


def test_a_fault(oracle: Any) -> None:
    ours, theirs = parted(oracle, WRONG)
    with pytest.raises(AssertionError, match=f"output token {TIED_AT} is {WRONG} .*no tie"):
        count_ties(oracle, PROMPT, ours, theirs)


def test_a_fault_behind_a_tie(oracle: Any) -> None:
    ours, theirs = parted(oracle, TWIN)
    ours[-1] = WRONG
    with pytest.raises(AssertionError, match=rf"tokens \[{NUM_TOKENS - 1}\] .*no ties"):
        count_ties(oracle, PROMPT, ours, theirs)


def test_a_text_cut_short(oracle: Any) -> None:
    theirs = continue_greedily(oracle, PROMPT, NUM_TOKENS)
    with pytest.raises(AssertionError, match=f"{NUM_TOKENS - 1} of ours stand against {NUM_TOKENS}"):
        count_ties(oracle, PROMPT, theirs[:-1], theirs)


def test_the_margin(oracle: Any) -> None:
    """Half of it below the best is a tie, twice as much is a fault."""
    ours, theirs = parted(oracle, TWIN)
    ours, theirs = ours[: TIED_AT + 1], theirs[: TIED_AT + 1]
    best_row = oracle.lm_head.weight[theirs[-1]].detach().clone()
    with torch.no_grad():
        best = oracle(torch.tensor([PROMPT + theirs[:-1]])).logits.max(-1).values[0, -1].item()
        oracle.lm_head.weight[TWIN] = best_row * (1 - TIE / 2 / best)
    assert count_ties(oracle, PROMPT, ours, theirs) == 1
    with torch.no_grad():
        oracle.lm_head.weight[TWIN] = best_row * (1 - 2 * TIE / best)
    with pytest.raises(AssertionError, match="no tie"):
        count_ties(oracle, PROMPT, ours, theirs)
