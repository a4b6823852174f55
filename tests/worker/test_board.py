"""Who may ride with whom, and how many places are free."""

from __future__ import annotations

from chairlift_client.worker_operations import ClaimedJob
from chairlift_worker.queue.attempts import Attempt, Board


def _attempt(name: str, *, losses: int = 1, alone: bool = False) -> Attempt:
    job = ClaimedJob(
        job_id=name, epoch=1, seq=1, losses=losses, failures=0, alone=alone, seed=0, deadline_ms=0,
        submitted_ms=0, boarded_ms=0, job_class="normal", tenant="a", body=b"", log=(),
    )  # fmt: skip
    return Attempt("p0", job)


def test_places_are_reserved_while_a_claim_is_under_way() -> None:
    board = Board(max_num_seqs=2, lookahead=1)
    assert board.reserve() == 3
    assert board.free_places == 0
    assert board.has_room
    board.unreserve(3)
    board.add(_attempt("a"))
    assert board.free_places == 2


def test_nothing_boards_beside_a_job_that_rides_alone() -> None:
    board = Board(max_num_seqs=4, lookahead=0)
    last_try = _attempt("a", losses=3, alone=True)
    board.add(last_try)
    assert board.free_places == 0
    last_try.proven = True
    assert board.free_places == 3


def test_a_suspect_is_one_until_its_first_token() -> None:
    board = Board(max_num_seqs=4, lookahead=0)
    suspect = _attempt("a", losses=2)
    board.add(suspect)
    assert board.carries_suspect
    suspect.proven = True
    assert not board.carries_suspect


def test_clearing_serves_one_partition_until_it_is_done() -> None:
    board = Board(max_num_seqs=4, lookahead=0)
    board.add(_attempt("a"))
    board.note_clearing("p1", True)
    board.note_clearing("p2", True)
    assert not board.has_room
    assert [board.reserve_for(prefix) for prefix in ("p0", "p1", "p2")] == [0, 1, 0]
    board.unreserve(1)
    board.drop("a 1")
    board.note_clearing("p2", False)
    assert board.clearing_for == "p1"
    board.note_clearing("p1", False)
    assert board.free_places == 4


def test_a_stalled_pool_takes_no_more() -> None:
    board = Board(max_num_seqs=4, lookahead=1)
    board.num_stalled = 2
    assert board.free_places == 0
    board.num_stalled = 1
    assert board.free_places == 5
