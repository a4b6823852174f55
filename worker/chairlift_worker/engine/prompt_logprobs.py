"""The logprobs of a prompt's tokens, gathered while it is computed, whatever its chunks.

rows of logits    p0 p1 p2 ...        the row of a position judges the token of the next one
prompt logprobs   -  t1 t2 t3 ...     nothing judges the first token
"""

from __future__ import annotations

import torch
from torch import Tensor

from chairlift_client.protocol import TokenLogprobs
from chairlift_worker.engine.logprobs import token_logprobs


class NotFinite(Exception):
    """Logits that are NaN or infinite."""


class PromptLogprobs:
    """Grows with the prompt. A prompt that is computed again, after a preemption, is not judged again."""

    def __init__(self, prompt_token_ids: tuple[int, ...], num_top: int) -> None:
        self._token_ids = prompt_token_ids
        self._num_top = num_top
        self._logprobs: list[TokenLogprobs | None] = [None]

    @property
    def logits_from(self) -> int | None:
        """The first position whose logits are still wanted; None when all are there."""
        position = len(self._logprobs) - 1
        return position if position < len(self._token_ids) - 1 else None

    @property
    def logprobs(self) -> tuple[TokenLogprobs | None, ...]:
        """One for each token; complete when `logits_from` is None."""
        return tuple(self._logprobs)

    def hear(self, rows: Tensor, start: int) -> None:
        """Rows of logits [R, V] of the positions from `start` on; those that judge no new token are skipped.

        Raises NotFinite.
        """
        first = self.logits_from
        if first is None:
            return
        assert start <= first, (start, first)
        judged = self._token_ids[first + 1 : start + len(rows) + 1]
        wanted = rows[first - start : first - start + len(judged)]
        is_finite: list[bool] = torch.isfinite(wanted.sum(dim=-1)).tolist()
        if not all(is_finite):
            raise NotFinite(f"logits of prompt token {first + is_finite.index(False)} are not finite")
        self._logprobs.extend(token_logprobs(wanted, judged, self._num_top))
