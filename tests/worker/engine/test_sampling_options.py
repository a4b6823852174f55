"""Every sampling option against its definition in plain Python: 20,000 seeded draws, chi-square."""

from __future__ import annotations

from collections import Counter
from functools import cache

import pytest
import torch

from chairlift_client.protocol import SamplingParams
from chairlift_worker.engine.penalties import TokenCounts, has_penalties
from chairlift_worker.engine.sampler import Draw, sample
from sampling_oracle import adjusted, distribution, draw

LOGITS = [1.3, -0.4, 2.2, 0.1, 0.1, -3.0, 1.9, 0.7, -1.2, 1.25]
PROMPT = (2, 9, 9, 5)
OUTPUT = (6, 6, 0, 8, 6)
BANNED = frozenset({7})
SEED = 20_261_201

OPTIONS = [
    SamplingParams(),
    SamplingParams(temperature=0.6),
    SamplingParams(temperature=2.5),
    SamplingParams(top_k=4),
    SamplingParams(top_p=0.75),
    SamplingParams(min_p=0.3),
    SamplingParams(typical_p=0.5),
    SamplingParams(typical_p=0.9, temperature=1.7),
    SamplingParams(repetition_penalty=1.8),
    SamplingParams(repetition_penalty=0.5),
    SamplingParams(presence_penalty=1.1),
    SamplingParams(presence_penalty=-0.7),
    SamplingParams(frequency_penalty=0.6),
    SamplingParams(logit_bias={5: 4.0, 2: -1.5, 0: 0.25}),
    SamplingParams(allowed_token_ids=(1, 2, 3, 6, 7)),
    SamplingParams(banned_token_ids=(2, 6)),
    SamplingParams(
        temperature=1.4,
        top_k=7,
        top_p=0.95,
        min_p=0.05,
        typical_p=0.9,
        repetition_penalty=1.2,
        presence_penalty=0.2,
        frequency_penalty=0.1,
        logit_bias={3: 1.0},
        banned_token_ids=(0,),
    ),
]


def plan(sampling: SamplingParams, position: int) -> Draw:
    counts = None
    if has_penalties(sampling):
        counts = TokenCounts(PROMPT)
        for token_id in OUTPUT:
            counts.append(token_id)
    allowed = None
    if sampling.allowed_token_ids is not None:
        allowed = torch.zeros(len(LOGITS), dtype=torch.bool)
        allowed[list(sampling.allowed_token_ids)] = True
    banned = BANNED.union(sampling.banned_token_ids)
    return Draw(sampling, SEED, position, banned, allowed=allowed, counts=counts)


def draw_many(sampling: SamplingParams, num_draws: int) -> list[int]:
    rows = torch.tensor(LOGITS).expand(num_draws, -1)
    tokens = sample(rows, [plan(sampling, position) for position in range(num_draws)])
    return [token for token in tokens if token is not None]


@cache
def plain_draws() -> list[int]:
    return draw_many(SamplingParams(), 2_000)


def p_value(drawn: list[int], expected: dict[int, float]) -> float:
    """How likely a draw this far from `expected` is (Pearson's chi-square)."""
    counts = Counter(drawn)
    assert set(counts) <= set(expected)
    if len(expected) == 1:
        return 1.0
    statistic = sum((counts[i] - len(drawn) * p) ** 2 / (len(drawn) * p) for i, p in expected.items())
    half = torch.tensor([(len(expected) - 1) / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


def expected_of(sampling: SamplingParams) -> dict[int, float]:
    return distribution(adjusted(LOGITS, sampling, PROMPT, OUTPUT, BANNED), sampling)


def name(sampling: SamplingParams) -> str:
    return str(sampling).removeprefix("SamplingParams")


@pytest.mark.parametrize("sampling", OPTIONS, ids=name)
def test_draws_follow_the_definition(sampling: SamplingParams) -> None:
    drawn = draw_many(sampling, 300)
    assert p_value(drawn, expected_of(sampling)) > 1e-6 / len(OPTIONS)


@pytest.mark.slow
@pytest.mark.parametrize("sampling", OPTIONS, ids=name)
def test_20000_draws_follow_the_definition(sampling: SamplingParams) -> None:
    drawn = draw_many(sampling, 20_000)
    assert len(drawn) == 20_000
    assert p_value(drawn, expected_of(sampling)) > 1e-6 / len(OPTIONS)


@pytest.mark.parametrize("sampling", OPTIONS[1:], ids=name)
def test_the_test_would_notice_that_an_option_does_nothing(sampling: SamplingParams) -> None:
    drawn = plain_draws()
    expected = expected_of(sampling)
    assert not set(drawn) <= set(expected) or p_value(drawn, expected) < 1e-6 / len(OPTIONS)


@pytest.mark.parametrize("sampling", [*OPTIONS, SamplingParams(temperature=0.0)], ids=name)
def test_every_draw_is_the_oracles(sampling: SamplingParams) -> None:
    """Not just in distribution: the noise is documented, so each single token can be foretold."""
    row = adjusted(LOGITS, sampling, PROMPT, OUTPUT, BANNED)
    drawn = draw_many(sampling, 100)
    assert drawn == [draw(row, sampling, SEED, 0, position) for position in range(100)]


def test_choices_have_noise_of_their_own() -> None:
    rows = torch.zeros(2, 5000)
    first, second = sample(rows, [Draw(SamplingParams(), 1, 0, choice=choice) for choice in (0, 1)])
    assert first != second
    row = [0.0] * 5000
    assert [first, second] == [draw(row, SamplingParams(), 1, choice, 0) for choice in (0, 1)]


def test_counts_grow_without_losing_any() -> None:
    counts = TokenCounts((3, 3, 5))
    for token_id in [*range(100), *range(0, 100, 2)]:
        counts.append(token_id)
    known = dict(zip(counts.token_ids.tolist(), counts.output_counts.tolist(), strict=True))
    assert known == {token_id: 2 - token_id % 2 for token_id in range(100)}
    assert dict(zip(TokenCounts((7,)).token_ids.tolist(), [0.0], strict=True)) == {7: 0.0}
