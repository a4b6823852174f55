"""Whether a greedy text is the oracle's, but for choices that the oracle itself can hardly make.

Matrix products differ in the last bits with the shape of a batch. Where the oracle's two best logits all
but coincide, either may win; every other difference is a fault.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any

import torch
from torch import Tensor

TIE = 1e-4
"""Logits within this of the best are as good as the best."""


def count_ties(oracle: Any, prompt: Seq[int], ours: Seq[int], theirs: Seq[int]) -> int:
    """How often our output of `prompt` parts from the oracle's way; 0 where it equals `theirs`.

    `oracle` is a transformers model, `theirs` its own greedy output. Behind the first difference the two
    texts have nothing to do with each other, so all of `ours` is held against what the oracle makes of
    our text (teacher forcing). AssertionError, with the logits, for a difference that is no tie. Where
    the texts end is for the caller to judge.
    """
    if list(ours) == list(theirs):
        return 0
    first = _first_difference(ours, theirs)
    logits = _next_token_logits(oracle, prompt, ours)
    below = logits.max(-1).values - logits.gather(-1, torch.tensor(ours)[:, None])[:, 0]
    _check_tie(logits, ours, theirs, first)
    clear = [position for position in range(first, len(ours)) if below[position] > TIE]
    assert not clear, f"output tokens {clear} lie {below[clear].tolist()} below the oracle's best: no ties"
    return 1 + int((below[first + 1 :] > 0).sum())


def _first_difference(ours: Seq[int], theirs: Seq[int]) -> int:
    for position, (mine, other) in enumerate(zip(ours, theirs, strict=False)):
        if mine != other:
            return position
    raise AssertionError(f"no token differs, but {len(ours)} of ours stand against {len(theirs)} of theirs")


def _check_tie(logits: Tensor, ours: Seq[int], theirs: Seq[int], position: int) -> None:
    """At `position` both tokens must be among the oracle's best."""
    row = logits[position]
    best, second = row.topk(2).values.tolist()
    mine, other = row[ours[position]].item(), row[theirs[position]].item()
    message = (
        f"output token {position} is {ours[position]} (logit {mine}), the oracle's {theirs[position]} "
        f"({other}); the two best logits are {best} and {second}: no tie"
    )
    assert best - second <= TIE, message
    assert best - min(mine, other) <= TIE, message


def _next_token_logits(oracle: Any, prompt: Seq[int], output: Seq[int]) -> Tensor:
    """What the oracle thinks before each token of `output`, float32 [tokens, vocabulary]."""
    text = torch.tensor([[*prompt, *output[:-1]]])
    with torch.no_grad():
        logits: Tensor = oracle(text).logits[0, len(prompt) - 1 :]
    return logits.float()
