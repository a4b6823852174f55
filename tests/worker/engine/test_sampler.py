from __future__ import annotations

from math import exp

import pytest
import torch
from torch import Tensor

from chairlift_client.protocol import SamplingParams
from chairlift_worker.engine.sampler import Draw, sample

GREEDY = SamplingParams(temperature=0.0)
NUM_DRAWS = 2500
LOGITS = [1.3, -0.4, 2.2, 0.1, 0.1, -3.0, 1.9, 0.7, -1.2, 1.3]


def expected_probabilities(logits: list[float], sampling: SamplingParams) -> dict[int, float]:
    """The filters as they are defined, in plain Python."""
    largest = max(logits)
    weights = {i: exp((logit - largest) / sampling.temperature) for i, logit in enumerate(logits)}
    best_first = sorted(weights, key=lambda i: (-weights[i], i))
    if sampling.top_k > 0:
        best_first = best_first[: sampling.top_k]
    total = sum(weights[i] for i in best_first)
    nucleus: list[int] = []
    mass = 0.0
    for i in best_first:
        if nucleus and mass >= sampling.top_p:
            break
        nucleus.append(i)
        mass += weights[i] / total
    kept = [i for i in nucleus if weights[i] >= sampling.min_p * weights[nucleus[0]]]
    total = sum(weights[i] for i in kept)
    return {i: weights[i] / total for i in kept}


def draw_many(
    logits: list[float], sampling: SamplingParams, seed: int, num_draws: int = NUM_DRAWS
) -> list[int]:
    rows = torch.tensor(logits).expand(num_draws, -1)
    tokens = sample(rows, [Draw(sampling, seed, position) for position in range(num_draws)])
    assert None not in tokens
    return [token for token in tokens if token is not None]


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(),
        SamplingParams(temperature=0.6),
        SamplingParams(temperature=2.5),
        SamplingParams(top_k=4),
        SamplingParams(top_k=1),
        SamplingParams(top_p=0.75),
        SamplingParams(top_p=0.01),
        SamplingParams(min_p=0.3),
        SamplingParams(min_p=1.0),
        SamplingParams(temperature=1.4, top_k=8, top_p=0.9, min_p=0.12),
    ],
    ids=lambda sampling: "-".join(
        f"{name}={getattr(sampling, name)}" for name in ("temperature", "top_k", "top_p", "min_p")
    ),
)
def test_draws_follow_the_distribution(sampling: SamplingParams) -> None:
    expected = expected_probabilities(LOGITS, sampling)
    drawn = draw_many(LOGITS, sampling, seed=17)
    assert set(drawn) <= set(expected)
    chi_square = sum((drawn.count(i) - NUM_DRAWS * p) ** 2 / (NUM_DRAWS * p) for i, p in expected.items())
    # The seed is fixed; 30 is beyond the 99.9 % quantile of 9 degrees of freedom (27.9).
    assert chi_square < 30.0


def test_the_test_would_notice_a_wrong_distribution() -> None:
    expected = expected_probabilities(LOGITS, SamplingParams())
    drawn = draw_many(LOGITS, SamplingParams(temperature=1.2), seed=17)
    assert sum((drawn.count(i) - NUM_DRAWS * p) ** 2 / (NUM_DRAWS * p) for i, p in expected.items()) > 30.0


@pytest.mark.parametrize("sampling", [SamplingParams(top_k=3), SamplingParams(top_p=0.7)])
def test_a_tie_at_the_edge_of_a_filter_goes_to_the_lower_id(sampling: SamplingParams) -> None:
    logits = [0.0, 1.0, 0.0, 1.0, 0.0, -9.0]
    assert set(draw_many(logits, sampling, seed=3, num_draws=200)) == {0, 1, 3}


def test_of_a_whole_vocabulary_of_ties_the_first_are_kept() -> None:
    rows = torch.zeros(60, 5000)
    drawn = sample(rows, [Draw(SamplingParams(top_k=3), 1, position) for position in range(60)])
    assert set(drawn) == {0, 1, 2}
    drawn = sample(rows, [Draw(SamplingParams(top_p=3.5 / 5000), 1, position) for position in range(60)])
    assert set(drawn) == {0, 1, 2, 3}


@pytest.mark.parametrize("top_p", [1e-50, 0.04, 0.1, 0.25, 0.4, 0.55, 0.7, 0.85, 0.97])
def test_top_p_keeps_the_shortest_prefix(top_p: float) -> None:
    """Nearly even probabilities, so that all that is kept is drawn."""
    logits = [0.02 * index for index in range(20)]
    sampling = SamplingParams(top_p=top_p)
    drawn = sample(torch.tensor(logits).expand(400, -1), [Draw(sampling, 1, i) for i in range(400)])
    assert set(drawn) == set(expected_probabilities(logits, sampling))


def test_greedy_takes_the_largest_and_of_equals_the_lowest_id() -> None:
    logits = torch.zeros(3, 49_157)
    logits[0, [49_156, 40_000, 123]] = 5.0
    logits[1, 7] = -1.0
    logits[2, 49_156] = 1e-3
    assert sample(logits, [Draw(GREEDY, 0, 0)] * 3) == [123, 0, 49_156]


@pytest.mark.parametrize("temperature", [1e-300, 1e-30, 1e-6, 1e-5, 1e-4])
def test_tiny_temperatures_are_greedy(temperature: float) -> None:
    logits = torch.tensor([LOGITS, [20.0 * logit for logit in LOGITS]])
    assert sample(logits, [Draw(SamplingParams(temperature=temperature), 1, 0)] * 2) == [2, 2]


def test_top_k_larger_than_the_vocabulary_filters_nothing() -> None:
    rows = torch.tensor(LOGITS).expand(200, -1)
    plain = sample(rows, [Draw(SamplingParams(), 1, i) for i in range(200)])
    assert sample(rows, [Draw(SamplingParams(top_k=1000), 1, i) for i in range(200)]) == plain


def mixed_draws(num_rows: int) -> list[Draw]:
    kinds = [
        GREEDY,
        SamplingParams(),
        SamplingParams(temperature=0.7, top_p=0.9),
        SamplingParams(top_k=50, min_p=0.02),
    ]
    return [
        Draw(kinds[row % 4], seed=row, position=row * 3, banned=frozenset({row} if row % 3 == 0 else ()))
        for row in range(num_rows)
    ]


@pytest.mark.parametrize("vocab_size", [101, 32_003])
def test_a_row_does_not_depend_on_its_neighbours(vocab_size: int) -> None:
    logits = 4.0 * torch.randn(12, vocab_size, generator=torch.Generator().manual_seed(5))
    draws = mixed_draws(12)
    together = sample(logits, draws)
    alone = [sample(logits[row : row + 1].clone(), [draw])[0] for row, draw in enumerate(draws)]
    order = [7, 2, 11, 0]
    some = sample(logits[order], [draws[row] for row in order])
    assert together == alone
    assert some == [together[row] for row in order]


def test_the_same_seed_repeats_and_another_does_not() -> None:
    rows = torch.zeros(50, 1000)

    def draws(seed: int) -> list[int | None]:
        return sample(rows, [Draw(SamplingParams(), seed, position) for position in range(50)])

    assert draws(1) == draws(1)
    assert sum(a == b for a, b in zip(draws(1), draws(2), strict=True)) < 5


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize(
    "sampling", [GREEDY, SamplingParams(), SamplingParams(top_k=3, top_p=0.5, min_p=0.5)]
)
def test_a_row_that_is_not_finite_fails_alone(bad: float, sampling: SamplingParams) -> None:
    logits = torch.tensor(LOGITS).repeat(3, 1)
    draws = [Draw(sampling, seed=9, position=row) for row in range(3)]
    healthy = sample(logits, draws)
    logits[1, 4] = bad
    assert sample(logits, draws) == [healthy[0], None, healthy[2]]
    assert sample(logits[1:2], draws[1:2]) == [None]


@pytest.mark.parametrize("sampling", [GREEDY, SamplingParams(temperature=3.0), SamplingParams(top_k=9)])
def test_banned_tokens_are_never_drawn_and_the_logits_stay_as_they_were(sampling: SamplingParams) -> None:
    logits: Tensor = torch.tensor(LOGITS).repeat(300, 1)
    before = logits.clone()
    tokens = sample(logits, [Draw(sampling, 1, i, banned=frozenset({2, 6})) for i in range(300)])
    assert not {2, 6} & set(tokens)
    assert torch.equal(logits, before)


def test_all_but_one_banned() -> None:
    banned = frozenset(range(10)) - {5}
    for sampling in (GREEDY, SamplingParams(), SamplingParams(top_k=4), SamplingParams(top_p=0.5)):
        assert sample(torch.tensor([LOGITS]), [Draw(sampling, 1, 0, banned)]) == [5]
