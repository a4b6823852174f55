from __future__ import annotations

import gzip
import io
import json
import random
from pathlib import Path

import pytest
from rich.console import Console

from chairlift_client.errors import ConfigError
from chairlift_worker.bench import cells, prefix, workloads


def test_a_trace_of_arrivals_is_clipped_and_sped_up(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:17:03.9799600,4808,10\n"
        "2023-11-16 18:17:05.9799600,110,0\n"
        "2023-11-16 18:18:03.9799600,7,900\n"
    )
    arrivals = workloads.read_arrivals(path, max_jobs=2, max_prompt=1000, max_output=50, speedup=2.0)
    assert arrivals == (workloads.Arrival(0.0, 1000, 10), workloads.Arrival(1.0, 110, 1))


def test_blocks_and_prompts_are_read_plain_and_packed(tmp_path: Path) -> None:
    blocks = tmp_path / "blocks.jsonl.gz"
    with gzip.open(blocks, "wt") as file:
        file.write('{"timestamp": 0, "hash_ids": [0, 1]}\n{"timestamp": 3, "hash_ids": [0, 2]}\n')
    assert workloads.read_block_trace(blocks) == ((0, 1), (0, 2))
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"turns": ["a", "b"]}\n\n{"prompt": "ç"}\n', encoding="utf-8")
    assert workloads.read_prompts(prompts) == ("a", "ç")


def test_a_file_is_looked_for_below_the_data_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "there").write_text("x")
    monkeypatch.delenv("CHAIRLIFT_DATA", raising=False)
    with pytest.raises(ConfigError, match="CHAIRLIFT_DATA names no folder"):
        workloads.find("there")
    monkeypatch.setenv("CHAIRLIFT_DATA", str(tmp_path))
    assert workloads.find("there") == tmp_path / "there"


def test_a_bench_that_is_started_again_measures_only_what_is_missing(tmp_path: Path) -> None:
    measured: list[int] = []

    def measure(size: int) -> dict[str, int]:
        measured.append(size)
        return {"double": 2 * size}

    for sizes in ((1, 2), (1, 2, 3)):
        results = cells.Results("sizes", tmp_path / "results")
        rows = [results.measure({"size": size}, lambda size=size: measure(size)) for size in sizes]  # type: ignore[misc]
    assert measured == [1, 2, 3]
    assert [row.figures["double"] for row in rows] == [2, 4, 6]
    assert json.loads(cells.to_json(rows))[2] == {"parameters": {"size": 3}, "figures": {"double": 6}}
    printed = io.StringIO()
    Console(width=80, file=printed).print(cells.to_table(rows, "sizes"))
    assert "double" in printed.getvalue()


def brute_force_best(requests: list[list[int]], num_blocks: int) -> float:
    """Keeps any set of blocks that fits, and takes the best of all ways."""
    states: dict[frozenset[int], int] = {frozenset(): 0}
    for request in requests:
        after: dict[frozenset[int], int] = {}
        for cached, hits in states.items():
            num = 0
            while num < len(request) and request[num] in cached:
                num += 1
            for kept in subsets(sorted(cached | set(request)), num_blocks):
                after[kept] = max(after.get(kept, 0), hits + num)
        states = after
    return max(states.values()) / sum(map(len, requests))


def subsets(items: list[int], size: int) -> list[frozenset[int]]:
    found = [frozenset[int]()]
    for item in items:
        found += [kept | {item} for kept in found if len(kept) < size]
    return found


@pytest.mark.parametrize("seed", range(12))
def test_the_best_hit_rate_is_that_of_all_ways_tried(seed: int) -> None:
    chance = random.Random(seed)
    paths = [[0, 1, 2], [0, 1, 3], [0, 4], [5], [5, 6]]
    requests = [chance.choice(paths)[: chance.randint(1, 3)] for _ in range(9)]
    for num_blocks in (1, 2, 3):
        best = prefix.best_hit_rate(requests, num_blocks)
        assert best == pytest.approx(brute_force_best(requests, num_blocks))
        assert prefix.hit_rate(requests, num_blocks) <= best
        for is_told in (False, True):
            assert prefix.recency_hit_rate(requests, num_blocks, is_told=is_told) <= best
    assert prefix.hit_rate(requests, 50) == pytest.approx(prefix.unlimited_hit_rate(requests))
