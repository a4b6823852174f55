"""The randomness of a draw: a counter, not a state, so that any worker can repeat any draw.

Every number drawn is a pure function of (seed, choice, position, purpose, token id). `position` is the
number of output tokens before the drawn one. A kernel reproduces it from this definition; all
arithmetic is modulo 2**64, `>>` is the logical shift:

    mix(z):  z ^= z >> 30;  z *= 0xBF58476D1CE4E5B9
             z ^= z >> 27;  z *= 0x94D049BB133111EB
             z ^= z >> 31
    key   = 0;  for part in (seed, choice, position, purpose):  key = mix(key + GAMMA + part)
    bits  = mix(key + (token_id + 1) * GAMMA)         GAMMA = 0x9E3779B97F4A7C15
    v     = float32(bits >> 11) * 2**-53, at least 2**-54, at most 1 - 2**-24
    noise = -log(-log1p(-v))                           standard Gumbel, float32

So the bits of one draw are the SplitMix64 stream (Steele, Lea, Flood, "Fast splittable pseudorandom
number generators", 2014) with the key as its seed, and token i takes the i-th number of it. Small v
keep full relative precision, which is where the large noises come from that let rare tokens win.
"""

from __future__ import annotations

from enum import IntEnum

import torch
from torch import Tensor

_BITS = 1 << 64
_MASK = _BITS - 1
_GAMMA = 0x9E3779B97F4A7C15
_FIRST = 0xBF58476D1CE4E5B9
_SECOND = 0x94D049BB133111EB


class Purpose(IntEnum):
    """What a draw is for, so that two draws at one position share no noise."""

    TOKEN = 0


def draw_key(seed: int, choice: int, position: int, purpose: Purpose) -> int:
    """The 64-bit key of one draw. A seed of any size counts modulo 2**64."""
    key = 0
    for part in (seed, choice, position, int(purpose)):
        key = _mix((key + _GAMMA + part) & _MASK)
    return key


def random_bits(key: int, token_ids: Tensor) -> Tensor:
    """64 random bits [N], read as int64, for the token ids [N] int64."""
    bits = (token_ids + 1).mul_(_signed(_GAMMA)).add_(_signed(key))
    bits.bitwise_xor_(_shift_right(bits, 30)).mul_(_signed(_FIRST))
    bits.bitwise_xor_(_shift_right(bits, 27)).mul_(_signed(_SECOND))
    return bits.bitwise_xor_(_shift_right(bits, 31))


def gumbel_noise(bits: Tensor) -> Tensor:
    """Standard Gumbel noise [N] float32, always finite, from random bits [N] int64."""
    uniform = _shift_right(bits, 11).to(torch.float32).mul_(2.0**-53)
    uniform.clamp_(2.0**-54, 1.0 - 2.0**-24)
    return uniform.neg_().log1p_().neg_().log_().neg_()


def _mix(value: int) -> int:
    value = ((value ^ (value >> 30)) * _FIRST) & _MASK
    value = ((value ^ (value >> 27)) * _SECOND) & _MASK
    return value ^ (value >> 31)


def _shift_right(values: Tensor, num_bits: int) -> Tensor:
    """The logical shift; torch's own drags the sign along."""
    return (values >> num_bits).bitwise_and_((1 << (64 - num_bits)) - 1)


def _signed(value: int) -> int:
    """The same 64 bits as torch's int64 reads them."""
    return value - _BITS if value >> 63 else value
