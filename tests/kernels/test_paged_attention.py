"""Reference and CPU path against dense attention written down a third time, one row at a time."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from chairlift_kernels import cpu, paged_attention, reference

Op = Callable[..., Tensor]
OPS = pytest.mark.parametrize("op", [reference.paged_attention, paged_attention], ids=["reference", "cpu"])


class Case(NamedTuple):
    """Inputs of one call, and the same K and V as dense [context, Hkv, D] per sequence."""

    query: Tensor
    key_cache: Tensor
    value_cache: Tensor
    query_starts: Tensor
    context_lens: Tensor
    block_tables: Tensor
    keys: list[Tensor]
    values: list[Tensor]


def make_case(
    lengths: list[tuple[int, int]],
    *,
    heads: tuple[int, int] = (4, 2),
    head_dim: int = 16,
    block_size: int = 4,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> Case:
    """`lengths` are (query length, context) pairs. Blocks are shuffled; unused slots hold NaN."""
    torch.manual_seed(seed)
    num_heads, num_kv_heads = heads
    needed = [math.ceil(context / block_size) for _, context in lengths]
    free = list(range(sum(needed) + 3))
    random.Random(seed).shuffle(free)
    shape = (len(free), block_size, num_kv_heads, head_dim)
    key_cache, value_cache = (torch.full(shape, float("nan"), dtype=dtype) for _ in range(2))
    tables = torch.full((len(lengths), max(needed)), free.pop(), dtype=torch.int32)  # padded with a NaN block
    keys, values = [], []
    for index, (_, context) in enumerate(lengths):
        blocks = torch.tensor([free.pop() for _ in range(needed[index])])
        tables[index, : len(blocks)] = blocks
        positions = torch.arange(context)
        slots = blocks[positions // block_size] * block_size + positions % block_size
        key, value = (torch.randn(context, num_kv_heads, head_dim).to(dtype) for _ in range(2))
        reference.write_kv(key, value, key_cache, value_cache, slots)
        keys.append(key)
        values.append(value)
    starts = torch.tensor([0] + [query_len for query_len, _ in lengths]).cumsum(0).int()
    query = torch.randn(int(starts[-1]), num_heads, head_dim).to(dtype)
    contexts = torch.tensor([context for _, context in lengths], dtype=torch.int32)
    return Case(query, key_cache, value_cache, starts, contexts, tables, keys, values)


def dense(
    case: Case,
    *,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    output = torch.empty_like(case.query, dtype=torch.float64)
    group = case.query.shape[1] // case.keys[0].shape[1]
    for index, (key, value) in enumerate(zip(case.keys, case.values, strict=True)):
        start, end = int(case.query_starts[index]), int(case.query_starts[index + 1])
        for row in range(start, end):
            position = len(key) - (end - row)
            first = 0 if window is None else max(0, position - window + 1)
            for head in range(case.query.shape[1]):
                seen = key[first : position + 1, head // group].double()
                scores = seen @ case.query[row, head].double() * scale
                if soft_cap is not None:
                    scores = soft_cap * torch.tanh(scores / soft_cap)
                weights = scores.exp()
                total = weights.sum() + (0 if sinks is None else sinks[head].double().exp())
                output[row, head] = weights / total @ value[first : position + 1, head // group].double()
    return output


MIXED = [(1, 1), (5, 5), (1, 30), (7, 19), (1, 9), (1, 33), (4, 4), (1, 29), (3, 30)]


def check(op: Op, case: Case, *, atol: float = 1e-5, **options: object) -> None:
    scale = case.query.shape[-1] ** -0.5
    actual = op(*case[:6], scale=scale, **options)
    assert actual.dtype == case.query.dtype
    expected = dense(case, scale=scale, **options)  # type: ignore[arg-type]
    torch.testing.assert_close(actual.double(), expected, atol=atol, rtol=atol)


@OPS
@pytest.mark.parametrize("heads", [(2, 2), (4, 1), (8, 2), (8, 1), (9, 3)])
def test_head_groups(op: Op, heads: tuple[int, int]) -> None:
    check(op, make_case(MIXED, heads=heads))


@OPS
@pytest.mark.parametrize("head_dim", [8, 20, 64, 96])
def test_head_dims(op: Op, head_dim: int) -> None:
    check(op, make_case(MIXED, head_dim=head_dim, block_size=16))


@OPS
@pytest.mark.parametrize("window", [1, 3, 8, 30, 100])
def test_window(op: Op, window: int) -> None:
    check(op, make_case(MIXED), window=window)


@OPS
@pytest.mark.parametrize("window", [None, 5])
def test_soft_cap_and_sinks(op: Op, window: int | None) -> None:
    case = make_case(MIXED)
    check(op, case, window=window, soft_cap=0.7)
    check(op, case, window=window, sinks=torch.randn(4))
    check(op, case, window=window, soft_cap=2.0, sinks=torch.randn(4))


@OPS
@pytest.mark.parametrize(("dtype", "atol"), [(torch.bfloat16, 2e-2), (torch.float16, 2e-3)])
def test_half_precision(op: Op, dtype: torch.dtype, atol: float) -> None:
    check(op, make_case(MIXED, dtype=dtype), atol=atol)


@OPS
def test_slots_before_every_window_are_not_read(op: Op) -> None:
    case = make_case([(1, 30), (3, 21)])
    for index, first in ((0, 26), (1, 15)):
        for block in case.block_tables[index, : first // 4].tolist():
            case.key_cache[block] = case.value_cache[block] = float("nan")
    check(op, case, window=4)


@OPS
def test_a_sequence_of_nan_spoils_only_itself(op: Op) -> None:
    case = make_case([(1, 9), (1, 9), (1, 9)])
    clean = op(*case[:6], scale=0.25)
    case.key_cache[case.block_tables[1, 0]] = float("nan")
    spoilt = op(*case[:6], scale=0.25)
    assert spoilt[1].isnan().all()
    assert torch.equal(spoilt[[0, 2]], clean[[0, 2]])


@OPS
def test_sequences_without_rows_are_passed_over(op: Op) -> None:
    check(op, make_case([(0, 5), (2, 5), (0, 1), (1, 8), (0, 3)]))


def test_random_batches_agree() -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    draw = random.Random(seed)
    for _ in range(30):
        lengths = []
        for _ in range(draw.randint(1, 12)):
            context = draw.randint(1, 90)
            lengths.append((draw.choice([1, 1, 1, 2, 3, draw.randint(1, context)]), context))
        lengths = [(min(query_len, context), context) for query_len, context in lengths]
        case = make_case(
            lengths,
            heads=draw.choice([(4, 4), (4, 2), (6, 2)]),
            block_size=draw.choice([1, 4, 16]),
            seed=draw.randrange(2**31),
        )
        window = draw.choice([None, 1, 7, 40])
        expected = reference.paged_attention(*case[:6], scale=0.3, window=window)
        actual = paged_attention(*case[:6], scale=0.3, window=window)
        torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)


def test_a_group_is_split_before_its_copy_grows_large(monkeypatch: pytest.MonkeyPatch) -> None:
    case = make_case(MIXED * 3)
    expected = reference.paged_attention(*case[:6], scale=0.25)
    for group_bytes in (1, 2_000, 20_000):
        monkeypatch.setattr(cpu, "GROUP_BYTES", group_bytes)
        torch.testing.assert_close(paged_attention(*case[:6], scale=0.25), expected, atol=1e-5, rtol=1e-5)
