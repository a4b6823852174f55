"""What the model itself thinks of tokens: the log-softmax of its logits before anything is done to them."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from chairlift_client.protocol import TokenLogprobs


def token_logprobs(logits: Tensor, token_ids: Seq[int], num_top: int) -> list[TokenLogprobs]:
    """One for each row of logits [R, V] and the token that came to stand there.

    Each row is worked on by itself, so that its numbers do not depend on the other rows.
    """
    return [_of_row(row, token_id, num_top) for row, token_id in zip(logits, token_ids, strict=True)]


def _of_row(logits: Tensor, token_id: int, num_top: int) -> TokenLogprobs:
    logprobs = logits.float().log_softmax(dim=0)
    own = logprobs[token_id]
    # Equal ones with a lower id rank before it.
    num_before = (logprobs > own).sum() + (logprobs[:token_id] == own).sum()
    return TokenLogprobs(float(own), int(num_before) + 1, _top(logprobs, num_top))


def _top(logprobs: Tensor, num_top: int) -> tuple[tuple[int, float], ...]:
    """The largest, of equals the lower id first. topk alone would break ties as it likes."""
    num_top = min(num_top, len(logprobs))
    if num_top == 0:
        return ()
    threshold = torch.topk(logprobs, num_top).values[-1]
    token_ids = (logprobs >= threshold).nonzero()[:, 0]
    values, order = logprobs[token_ids].sort(descending=True, stable=True)
    return tuple(zip(token_ids[order][:num_top].tolist(), values[:num_top].tolist(), strict=True))
