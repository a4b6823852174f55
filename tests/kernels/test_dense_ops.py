"""RMSNorm, RoPE, SwiGLU and the KV write against their formulas in float64."""

from __future__ import annotations

import pytest
import torch

from chairlift_kernels import rms_norm, rope, silu_mul, write_kv

DTYPES = pytest.mark.parametrize(
    ("dtype", "atol"), [(torch.float32, 1e-5), (torch.float16, 4e-3), (torch.bfloat16, 3e-2)]
)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@DTYPES
def test_rms_norm(dtype: torch.dtype, atol: float) -> None:
    hidden, weight = (10 * torch.randn(7, 3, 33)).to(dtype), torch.rand(33).to(dtype)
    wide = hidden.double()
    expected = wide / (wide.pow(2).mean(-1, keepdim=True) + 1e-3).sqrt() * weight.double()
    actual = rms_norm(hidden, weight, 1e-3)
    assert actual.dtype == dtype
    torch.testing.assert_close(actual.double(), expected, atol=atol, rtol=atol)


@DTYPES
def test_silu_mul(dtype: torch.dtype, atol: float) -> None:
    gate_up = torch.randn(5, 2 * 19).to(dtype)
    gate, up = gate_up[:, :19].double(), gate_up[:, 19:].double()
    actual = silu_mul(gate_up)
    assert actual.dtype == dtype
    torch.testing.assert_close(actual.double(), gate / (1 + (-gate).exp()) * up, atol=atol, rtol=atol)


@DTYPES
@pytest.mark.parametrize("rotary_dim", [16, 8, 2])
def test_rope_turns_pairs_as_complex_numbers(dtype: torch.dtype, atol: float, rotary_dim: int) -> None:
    query, key = torch.randn(6, 4, 16).to(dtype), torch.randn(6, 2, 16).to(dtype)
    angles = 3 * torch.rand(6, rotary_dim // 2)
    turned = rope(query, key, angles.cos(), angles.sin())
    turn = torch.polar(torch.ones_like(angles).double(), angles.double())[:, None]
    for before, after in zip((query, key), turned, strict=True):
        half = rotary_dim // 2
        pairs = torch.complex(before[..., :half].double(), before[..., half:rotary_dim].double()) * turn
        expected = torch.cat((pairs.real, pairs.imag, before[..., rotary_dim:].double()), dim=-1)
        assert after.dtype == dtype
        torch.testing.assert_close(after.double(), expected, atol=atol, rtol=atol)


def test_write_kv_touches_only_its_slots() -> None:
    key_cache, value_cache = torch.full((3, 4, 2, 8), -1.0), torch.full((3, 4, 2, 8), -2.0)
    key, value = torch.randn(3, 2, 8), torch.randn(3, 2, 8)
    slots = torch.tensor([9, 0, 7])
    write_kv(key, value, key_cache, value_cache, slots)
    assert torch.equal(key_cache.view(12, 2, 8)[slots], key)
    assert torch.equal(value_cache.view(12, 2, 8)[slots], value)
    others = [slot for slot in range(12) if slot not in slots.tolist()]
    assert (key_cache.view(12, 2, 8)[others] == -1).all()
    assert (value_cache.view(12, 2, 8)[others] == -2).all()
