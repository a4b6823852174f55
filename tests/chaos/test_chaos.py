"""Everything goes wrong, and nothing is lost. See run.py for the long run."""

from __future__ import annotations

from pathlib import Path

import pytest

from chaos.faults import KILLS, WEIGHTS, draw_schedule
from chaos.run import Plan, run_chaos
from servers import Flavour

SEED = 20270101
LOSSY_SEED = 20270106


def test_a_seed_repeats_its_schedule() -> None:
    first, second = (
        draw_schedule(SEED, 600.0, mean_gap_s=1.0, lease_s=1.0, weights=WEIGHTS) for _ in range(2)
    )
    assert first == second
    assert {fault.kind for fault in first} == set(WEIGHTS)
    assert sum(fault.kind in KILLS for fault in first) <= 0.15 * len(first)


async def test_a_short_storm(tmp_path: Path) -> None:
    report = await run_chaos(Plan(SEED, 15.0, mean_gap_s=0.5, jobs_per_s=10.0, num_orders=40), tmp_path)
    print(report.table())
    assert not report.problems
    assert report.num_jobs >= 30
    assert report.faults.total() >= 20
    assert report.num_resumed > 0, "no fault met a running job"


async def test_power_cuts_are_never_silent(tmp_path: Path) -> None:
    plan = Plan(LOSSY_SEED, 8.0, mean_gap_s=0.5, num_orders=40, is_lossy=True)
    report = await run_chaos(plan, tmp_path)
    print(report.table())
    assert not report.problems
    assert report.bytes_lost > 0


@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_a_long_storm(flavour: Flavour, tmp_path: Path) -> None:
    report = await run_chaos(Plan(SEED + 1, 240.0, flavour, mean_gap_s=0.8), tmp_path)
    print(report.table())
    assert not report.problems
    assert report.faults.total() >= 200
