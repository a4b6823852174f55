from __future__ import annotations

from math import log, pi

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from chairlift_worker.engine.noise import Purpose, draw_key, gumbel_noise, random_bits

MASK = (1 << 64) - 1
EULER_MASCHERONI = 0.5772156649015329


def split_mix_64(seed: int, count: int) -> list[int]:
    """The generator as published, in plain integers."""
    numbers = []
    for _ in range(count):
        seed = (seed + 0x9E3779B97F4A7C15) & MASK
        value = ((seed ^ (seed >> 30)) * 0xBF58476D1CE4E5B9) & MASK
        value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & MASK
        numbers.append(value ^ (value >> 31))
    return numbers


def unsigned_bits(key: int, token_ids: list[int]) -> list[int]:
    bits: list[int] = random_bits(key, torch.tensor(token_ids)).tolist()
    return [number & MASK for number in bits]


def test_published_numbers() -> None:
    assert unsigned_bits(1234567, [0, 1, 2]) == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
    ]


@given(key=st.integers(0, MASK), count=st.integers(1, 50))
def test_bits_are_split_mix_64(key: int, count: int) -> None:
    assert unsigned_bits(key, list(range(count))) == split_mix_64(key, count)


def test_a_token_has_the_same_noise_in_any_selection() -> None:
    key = draw_key(5, 0, 3, Purpose.TOKEN)
    every = gumbel_noise(random_bits(key, torch.arange(1000)))
    some = torch.tensor([997, 3, 41])
    assert torch.equal(random_bits(key, some), random_bits(key, torch.arange(1000))[some])
    torch.testing.assert_close(gumbel_noise(random_bits(key, some)), every[some])


def test_every_part_of_the_key_counts() -> None:
    keys = {
        draw_key(seed, choice, position, Purpose.TOKEN)
        for seed in (0, 1, 2**63, -1)
        for choice in range(3)
        for position in range(50)
    }
    assert len(keys) == 4 * 3 * 50


def test_a_seed_counts_modulo_64_bits() -> None:
    assert draw_key(-1, 0, 0, Purpose.TOKEN) == draw_key(MASK, 0, 0, Purpose.TOKEN)


def test_extreme_bits_give_finite_noise() -> None:
    noise = gumbel_noise(torch.tensor([0, -1, 2**63 - 1, -(2**63)]))
    assert torch.isfinite(noise).all()
    assert noise[0] == pytest.approx(54 * log(2), rel=1e-5)  # v = 2**-54
    assert noise[1] == pytest.approx(-log(24 * log(2)), rel=1e-5)  # v = 1 - 2**-24


def test_noise_is_standard_gumbel() -> None:
    noise = gumbel_noise(random_bits(draw_key(11, 0, 0, Purpose.TOKEN), torch.arange(400_000))).double()
    assert noise.mean().item() == pytest.approx(EULER_MASCHERONI, abs=0.01)
    assert noise.var().item() == pytest.approx(pi**2 / 6, abs=0.02)
    for quantile in (0.001, 0.1, 0.5, 0.9, 0.999):
        expected = -log(-log(quantile))
        assert (noise < expected).double().mean().item() == pytest.approx(quantile, abs=0.003)


def test_neighbouring_positions_and_seeds_are_unrelated() -> None:
    rows = [
        gumbel_noise(random_bits(draw_key(seed, 0, position, Purpose.TOKEN), torch.arange(20_000)))
        for seed in (0, 1)
        for position in range(4)
    ]
    correlations = torch.corrcoef(torch.stack(rows)) - torch.eye(len(rows))
    assert correlations.abs().max() < 0.03
