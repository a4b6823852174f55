"""From logits to tokens: penalties, bias, bans, temperature, top-k, top-p, min-p, typical-p, Gumbel-max.

Adding standard Gumbel noise to log-probabilities and taking the largest draws from the distribution
(Gumbel 1954; Maddison, Tarlow, Minka, "A* sampling", 2014). Each row is worked on by itself, on
one-dimensional tensors of its own: what a job draws cannot depend on who rides beside it.

Ties are broken by the lower token id everywhere, so that every filter keeps a well-defined set:
"best first" below means larger logit first, and of equal ones the lower id first.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from math import log
from typing import NamedTuple

import torch
from torch import Tensor

from chairlift_client.protocol import SamplingParams
from chairlift_worker.engine.noise import Purpose, draw_key, gumbel_noise, random_bits
from chairlift_worker.engine.penalties import TokenCounts, penalize

GREEDY_BELOW = 1e-5
"""Temperatures below this are greedy: the division would leave nothing but the largest logit anyway."""


class Draw(NamedTuple):
    """How to choose one row's token."""

    sampling: SamplingParams
    seed: int
    position: int
    """Output tokens before this one."""
    banned: frozenset[int] = frozenset()
    choice: int = 0
    allowed: Tensor | None = None
    """Tokens that may be drawn, [V] bool on the CPU; None allows all. With `banned` they must leave one."""
    counts: TokenCounts | None = None
    """Needed where the sampling has penalties."""


def sample(logits: Tensor, draws: Seq[Draw]) -> list[int | None]:
    """One token id per row of logits [R, V] float32; None where the row is not finite.

    Logits so large that their sum overflows count as not finite.
    """
    is_finite: list[bool] = torch.isfinite(logits.sum(dim=-1)).tolist()
    chosen = [
        _choose(row, draw) for row, draw, finite in zip(logits, draws, is_finite, strict=True) if finite
    ]
    # One copy to the host for all rows.
    tokens: Iterator[int] = iter(torch.stack(chosen).tolist() if chosen else ())
    return [next(tokens) if finite else None for finite in is_finite]


def _choose(logits: Tensor, draw: Draw) -> Tensor:
    """The token [] int64 of one finite row [V]."""
    logits = _adjust(logits, draw)
    if draw.sampling.temperature < GREEDY_BELOW:
        return _best(logits)
    # The largest becomes 0 first, so that no temperature can overflow it.
    scores = (logits - logits.max()) / draw.sampling.temperature
    token_ids, scores = _filter(scores, draw.sampling)
    key = draw_key(draw.seed, draw.choice, draw.position, Purpose.TOKEN)
    return token_ids[_best(scores + gumbel_noise(random_bits(key, token_ids)))]


def _adjust(logits: Tensor, draw: Draw) -> Tensor:
    """Penalties, then the bias, then the bans; the row given stays as it was."""
    if draw.counts is not None:
        logits = penalize(logits, draw.counts, draw.sampling)
    if draw.sampling.logit_bias:
        token_ids = torch.tensor(list(draw.sampling.logit_bias), device=logits.device)
        bias = torch.tensor(list(draw.sampling.logit_bias.values()), device=logits.device)
        logits = logits.index_add(0, token_ids, bias.to(logits.dtype))
    if draw.allowed is not None:
        logits = logits.masked_fill(~draw.allowed.to(logits.device), -torch.inf)
    if draw.banned:
        banned = torch.tensor(sorted(draw.banned), device=logits.device)
        logits = logits.index_fill(0, banned, -torch.inf)
    return logits


def _filter(scores: Tensor, sampling: SamplingParams) -> tuple[Tensor, Tensor]:
    """The token ids [K] that may be drawn, ascending unless filtered, and their scores [K]."""
    token_ids = torch.arange(len(scores), device=scores.device)
    if 0 < sampling.top_k < len(scores):
        token_ids, scores = _keep_top_k(token_ids, scores, sampling.top_k)
    if sampling.top_p < 1.0:
        token_ids, scores = _keep_top_p(token_ids, scores, sampling.top_p)
    if sampling.min_p > 0.0:
        # p >= min_p * p_max, in logarithms; the largest score is 0.
        kept = scores >= log(sampling.min_p)
        token_ids, scores = token_ids[kept], scores[kept]
    if sampling.typical_p < 1.0:
        token_ids, scores = _keep_typical(token_ids, scores, sampling.typical_p)
    return token_ids, scores


def _keep_top_k(token_ids: Tensor, scores: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """The best k. topk alone would break ties as it likes, so it only finds the threshold."""
    threshold = torch.topk(scores, top_k).values[-1]
    token_ids, scores = _best_first(token_ids, scores, scores >= threshold)
    return token_ids[:top_k], scores[:top_k]


def _keep_top_p(token_ids: Tensor, scores: Tensor, top_p: float) -> tuple[Tensor, Tensor]:
    """The shortest best-first prefix whose probability reaches top_p; at least one token.

    Tokens below (1 - top_p) / N together weigh less than 1 - top_p, so they cannot be part of it:
    leaving them out first turns a sort of the vocabulary into one of a few hundred.
    """
    probabilities = scores.softmax(dim=0)
    candidates = probabilities >= (1.0 - top_p) / len(scores)
    candidates[_best(scores)] = True
    token_ids, scores = _best_first(token_ids, scores, candidates)
    probabilities, _ = probabilities[candidates].sort(descending=True)
    mass_before = probabilities.cumsum(dim=0) - probabilities
    num_kept = (mass_before < top_p).sum().clamp(min=1)
    return token_ids[:num_kept], scores[:num_kept]


def _keep_typical(token_ids: Tensor, scores: Tensor, typical_p: float) -> tuple[Tensor, Tensor]:
    """The tokens whose surprise is closest to the entropy, as few as reach typical_p together; at least one.

    Meister, Pimentel, Wiher, Cotterell, "Locally Typical Sampling", 2022. Of equally close ones the lower
    id goes first.
    """
    order = token_ids[scores > -torch.inf].argsort()
    token_ids, scores = token_ids[scores > -torch.inf][order], scores[scores > -torch.inf][order]
    log_probabilities = scores.log_softmax(dim=0)
    probabilities = log_probabilities.exp()
    entropy = -(probabilities * log_probabilities).sum()
    order = (-log_probabilities - entropy).abs().sort(stable=True).indices
    probabilities = probabilities[order]
    num_kept = (probabilities.cumsum(dim=0) - probabilities < typical_p).sum().clamp(min=1)
    return token_ids[order][:num_kept], scores[order][:num_kept]


def _best_first(token_ids: Tensor, scores: Tensor, kept: Tensor) -> tuple[Tensor, Tensor]:
    """The kept ones, best first. Equal scores stay in their order, which is by id."""
    scores, positions = scores[kept].sort(descending=True, stable=True)
    return token_ids[kept][positions], scores


def _best(scores: Tensor) -> Tensor:
    """The index [] of the largest, of equals the first; a third of argmax's time on a CPU."""
    return scores.max(dim=0).indices
