"""Which faults happen when: drawn from a seed alone, so that a seed repeats a schedule."""

from __future__ import annotations

import random
from typing import Literal, NamedTuple, TypeAlias, get_args

Kind: TypeAlias = Literal[
    "worker_kill",  # kill -9
    "server_kill",  # kill -9 and a restart
    "power_cut",  # the same, and the unsynced end of its append-only file is gone
    "worker_pause",  # SIGSTOP, later SIGCONT
    "worker_drain",  # SIGTERM, and another one starts
    "worker_clock",  # its wall clock steps by minutes
    "server_pause",
    "disk_full",  # no write to the append-only file succeeds
    "memory_full",  # maxmemory is reached
    "client_kill",  # the server closes connections
    "functions_lost",  # somebody flushes the function library
    "stream_deleted",  # somebody deletes a queue stream under its readers
    "cut",  # all connections of one party are reset
    "refuse",  # and new ones are refused for a while
    "delay",
    "freeze",  # nothing comes through for a while
    "half_open",  # connections that are there never answer again
]

KILLS: frozenset[Kind] = frozenset(("worker_kill", "server_kill", "power_cut"))

WEIGHTS: dict[Kind, int] = {
    "worker_kill": 12,
    "server_kill": 5,
    "worker_pause": 12,
    "worker_drain": 6,
    "worker_clock": 6,
    "server_pause": 6,
    "disk_full": 3,
    "memory_full": 5,
    "client_kill": 12,
    "functions_lost": 3,
    "stream_deleted": 4,
    "cut": 12,
    "refuse": 6,
    "delay": 8,
    "freeze": 8,
    "half_open": 8,
}

MOST_KILLS = 0.15
"""The part of faults that may be process kills: the others are the ones that programs get wrong."""

LOSSY_WEIGHTS: dict[Kind, int] = {
    "power_cut": 20,
    "worker_kill": 4,
    "cut": 30,
    "client_kill": 30,
    "delay": 10,
}
"""For a server that may lose what it has confirmed."""


class Fault(NamedTuple):
    """`target` in [0, 1) chooses among those there are then; `length_s` is for faults that last."""

    at_s: float
    kind: Kind
    target: float
    length_s: float


def draw_schedule(
    seed: int, duration_s: float, *, mean_gap_s: float, lease_s: float, weights: dict[Kind, int]
) -> list[Fault]:
    """Faults from shortly after the start to shortly before the end, in the order of their times."""
    rng = random.Random(seed)
    kinds = [kind for kind in get_args(Kind) if kind in weights]
    mild = [kind for kind in kinds if kind not in KILLS]
    num_kills = 0
    faults: list[Fault] = []
    at_s = rng.expovariate(1 / mean_gap_s)
    while at_s < duration_s:
        choices = kinds if num_kills + 1 <= MOST_KILLS * (len(faults) + 1) else mild
        kind = rng.choices(choices, [weights[kind] for kind in choices])[0]
        num_kills += kind in KILLS
        # Most are shorter than a lease, some longer than two.
        length_s = rng.choice((0.2, 0.5, 0.5, 1.2, 2.5)) * lease_s * rng.uniform(0.5, 1.0)
        faults.append(Fault(at_s, kind, rng.random(), length_s))
        at_s += rng.expovariate(1 / mean_gap_s)
    return faults
