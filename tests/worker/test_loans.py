"""Attempts that wait for an adapter: none is forgotten, whenever the room comes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from chairlift_client.worker_operations import ClaimedJob
from chairlift_worker.models.adapter_shelf import AdapterShelf, NoRoom
from chairlift_worker.queue.attempts import Attempt
from chairlift_worker.queue.loans import Loans


@dataclass(frozen=True)
class Weights:
    digest: str


@pytest.fixture
def shelf(tmp_path: Path) -> AdapterShelf:
    for name in "ab":
        (tmp_path / name).mkdir()
        (tmp_path / name / "adapter_config.json").write_text("{}")
    return AdapterShelf(tmp_path, lambda folder: Weights(folder.name), max_held=1)


def attempt(name: str) -> Attempt:
    job = ClaimedJob(name, 1, 1, 0, 0, False, 0, 0, 0, 0, "normal", "t", b"", ())
    return Attempt("prefix", job)


def refuse(shelf: AdapterShelf, name: str, order: int) -> NoRoom:
    with pytest.raises(NoRoom) as refused:
        shelf.borrow(name, order)
    return refused.value


def test_who_waits_is_told_when_an_adapter_is_given_back(shelf: AdapterShelf) -> None:
    retried: list[tuple[str, int]] = []
    loans = Loans(shelf, lambda attempt, order: retried.append((attempt.job.job_id, order)))
    first, second, third = map(attempt, ("one", "two", "three"))
    loans.lend(first, shelf.borrow("a", 1))
    loans.wait(third, 3, refuse(shelf, "b", 3))
    loans.wait(second, 2, refuse(shelf, "b", 2))
    assert retried == []
    loans.let_go(first)
    assert retried == [("two", 2), ("three", 3)]
    loans.let_go(first)
    loans.let_go(second)
    loans.let_go(third)
    assert len(retried) == 2, "nobody is left to be told"


def test_room_that_came_before_the_refusal_was_heard_of_is_not_missed(shelf: AdapterShelf) -> None:
    retried: list[int] = []
    loans = Loans(shelf, lambda _, order: retried.append(order))
    first, second, third = map(attempt, ("one", "two", "three"))
    loans.lend(first, shelf.borrow("a", 1))
    refusals = [refuse(shelf, "b", 2), refuse(shelf, "a", 3)]
    loans.let_go(first)
    loans.wait(second, 2, refusals[0])
    assert retried == [2]
    behind = refuse(shelf, "a", 3)  # second has not come yet
    loans.give_up(2)
    loans.wait(third, 3, behind)
    assert retried == [2, 3]
    loans.lend(third, shelf.borrow("a", 3))
