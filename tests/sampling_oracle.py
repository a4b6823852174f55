"""Sampling as docs/sampling.md defines it, in plain Python and double precision: slow and obvious."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq
from math import exp, inf, log, log1p
from struct import pack, unpack

from chairlift_client.protocol import SamplingParams, TokenLogprobs

_MASK = (1 << 64) - 1
_GAMMA = 0x9E3779B97F4A7C15


def log_softmax(logits: Iterable[float]) -> list[float]:
    """Natural logarithms of the probabilities; -inf stays -inf."""
    values = list(logits)
    largest = max(values)
    total = log(sum(exp(value - largest) for value in values))
    return [value - largest - total for value in values]


def judge(logits: Seq[float], token_id: int, num_top: int) -> TokenLogprobs:
    """The model's own opinion of a token."""
    logprobs = log_softmax(logits)
    best_first = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    top = tuple((i, logprobs[i]) for i in best_first[:num_top])
    return TokenLogprobs(logprobs[token_id], best_first.index(token_id) + 1, top)


def adjusted(
    logits: Seq[float], sampling: SamplingParams, prompt: Seq[int], output: Seq[int], banned: Iterable[int]
) -> list[float]:
    """Penalties, bias and bans; `banned` are those that depend on the output."""
    row = list(logits)
    for token_id in set(prompt) | set(output):
        penalty = sampling.repetition_penalty
        row[token_id] = row[token_id] / penalty if row[token_id] > 0 else row[token_id] * penalty
    for token_id in set(output):
        row[token_id] -= sampling.frequency_penalty * output.count(token_id) + sampling.presence_penalty
    for token_id, bias in sampling.logit_bias.items():
        row[token_id] += bias
    allowed = range(len(row)) if sampling.allowed_token_ids is None else sampling.allowed_token_ids
    permitted = set(allowed) - set(sampling.banned_token_ids) - set(banned)
    return [value if token_id in permitted else -inf for token_id, value in enumerate(row)]


def distribution(row: Seq[float], sampling: SamplingParams) -> dict[int, float]:
    """The probabilities that are drawn from, after `adjusted`; sums to 1."""
    scores = {i: value / sampling.temperature for i, value in enumerate(row) if value > -inf}
    if sampling.top_k > 0:
        scores = {i: scores[i] for i in _best_first(scores)[: sampling.top_k]}
    if sampling.top_p < 1:
        probabilities = _normal(scores)
        scores = {i: scores[i] for i in _reaching(_best_first(scores), probabilities, sampling.top_p)}
    if sampling.min_p > 0:
        least = max(scores.values()) + log(sampling.min_p)
        scores = {i: score for i, score in scores.items() if score >= least}
    if sampling.typical_p < 1:
        probabilities = _normal(scores)
        entropy = -sum(p * log(p) for p in probabilities.values() if p > 0)
        closest = sorted(scores, key=lambda i: (abs(-_log(probabilities[i]) - entropy), i))
        scores = {i: scores[i] for i in _reaching(closest, probabilities, sampling.typical_p)}
    return _normal(scores)


def draw(row: Seq[float], sampling: SamplingParams, seed: int, choice: int, position: int) -> int:
    """The token of `adjusted` logits: the largest, or Gumbel-max with the documented noise."""
    scores = _scores(row, sampling, seed, choice, position)
    return max(scores, key=lambda i: (scores[i], -i))


def lead(row: Seq[float], sampling: SamplingParams, seed: int, choice: int, position: int) -> float:
    """How far the token of `draw` was ahead of the second best."""
    best, second, *_ = *sorted(_scores(row, sampling, seed, choice, position).values())[::-1], -inf, -inf
    return best - second


def _scores(
    row: Seq[float], sampling: SamplingParams, seed: int, choice: int, position: int
) -> dict[int, float]:
    if sampling.temperature < 1e-5:
        return dict(enumerate(row))
    key = draw_key(seed, choice, position)
    return {i: _log(p) + gumbel(key, i) for i, p in distribution(row, sampling).items()}


def draw_key(seed: int, choice: int, position: int) -> int:
    """As the engine's noise module defines it, for the purpose of a token (0)."""
    key = 0
    for part in (seed, choice, position, 0):
        key = _mix((key + _GAMMA + part) & _MASK)
    return key


def gumbel(key: int, token_id: int) -> float:
    """Standard Gumbel noise of a token."""
    bits = _mix((key + (token_id + 1) * _GAMMA) & _MASK)
    uniform = min(max(_float32(bits >> 11) * 2.0**-53, 2.0**-54), 1.0 - 2.0**-24)
    return -log(-log1p(-uniform))


def _mix(value: int) -> int:
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def _float32(value: int) -> float:
    nearest: float = unpack("f", pack("f", value))[0]
    return nearest


def _best_first(scores: Mapping[int, float]) -> list[int]:
    return sorted(scores, key=lambda i: (-scores[i], i))


def _reaching(order: Seq[int], probabilities: Mapping[int, float], mass: float) -> list[int]:
    """The shortest beginning of `order` that has the mass; at least one."""
    kept: list[int] = []
    total = 0.0
    for token_id in order:
        if kept and total >= mass:
            break
        kept.append(token_id)
        total += probabilities[token_id]
    return kept


def _normal(scores: Mapping[int, float]) -> dict[int, float]:
    largest = max(scores.values())
    weights = {i: exp(score - largest) for i, score in scores.items()}
    total = sum(weights.values())
    return {i: weight / total for i, weight in weights.items()}


def _log(probability: float) -> float:
    return log(probability) if probability > 0 else -inf
