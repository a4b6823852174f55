from __future__ import annotations

import random
from collections.abc import Iterable

from chairlift_worker.bench.prefix import hit_rate, recency_hit_rate


def test_where_the_pool_is_too_small_for_all_it_keeps_those_that_came_before() -> None:
    """Half of the visitors never return, the others after 100 to 300 more have been there; 60 blocks."""
    chance = random.Random(3)
    due: dict[int, list[int]] = {}
    requests = []
    for now in range(15_000):
        for visitor in (*due.pop(now, []), 100_000 + now):
            requests.append([visitor])
            if chance.random() < (0.5 if visitor == 100_000 + now else 0.95):
                due.setdefault(now + chance.randint(100, 300), []).append(visitor)
    assert hit_rate(requests, 60) > 2 * recency_hit_rate(requests, 60)


def test_what_is_used_again_outlives_what_is_not() -> None:
    chance = random.Random(1)
    requests = [[chance.randrange(40)] if chance.random() < 0.3 else [1000 + n] for n in range(15_000)]
    assert hit_rate(requests, 60) > 1.3 * recency_hit_rate(requests, 60)


def test_where_the_last_used_is_the_next_used_nothing_is_lost() -> None:
    def drifting() -> Iterable[list[int]]:
        chance = random.Random(2)
        for number in range(20_000):
            yield [number // 20 + chance.randrange(50)]

    requests = list(drifting())
    assert hit_rate(requests, 100) > 0.97 * recency_hit_rate(requests, 100)


def test_a_change_is_learnt() -> None:
    """First a round that is too large, then prompts that come twice, soon after each other."""
    rounds = [[number % 150] for number in range(20_000)]
    pairs = [[10_000 + number // 2] for number in range(40_000)]
    both = hit_rate([*rounds, *pairs], 100) * 60_000 - hit_rate(rounds, 100) * 20_000
    assert both > 0.95 * 20_000
