"""Jobs that kill their workers: counted when they board, kept apart, and at last put away, alone.

Workers here are names with a board; one dies, without a word, as soon as a poisoned job rides with it.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from chairlift_client.operations import cancel, dead_list, dead_read
from chairlift_client.worker_operations import ClaimedJob, fail, hand_back
from protocol_driver import POLICY, Driver, job_number

BATCH = 32


@dataclass
class Crew:
    """Workers that step in turn: board, make a token of every job, finish them after a few steps."""

    driver: Driver
    poison: frozenset[str]
    chance: random.Random
    size: int = 3
    num_crashes: int = 0
    num_alone: int = 0
    boards: dict[str, dict[str, list[int]]] = field(default_factory=dict)
    suspects: dict[str, set[str]] = field(default_factory=dict)

    def step(self, worker: str) -> None:
        board, suspects = self.boards[worker], self.suspects[worker]
        is_alone = any(len(riding) > 2 for riding in board.values())
        capacity = 0 if is_alone else BATCH - len(board)
        jobs = self.driver.take(worker, capacity, on_board=len(board), carries_suspect=bool(suspects))
        for job in jobs:
            self.take_on_board(worker, job)
        assert len(suspects) <= 1
        if any(job.alone for job in jobs):
            assert len(board) == 1
        if self.poison & board.keys():
            self.crash(worker)
        else:
            self.compute(worker)

    def take_on_board(self, worker: str, job: ClaimedJob) -> None:
        riding = [job.epoch, job.seq]
        if job.alone:
            riding.append(1)
            self.num_alone += 1
        self.boards[worker][job.job_id] = riding
        if job.losses > 1:
            self.suspects[worker].add(job.job_id)

    def crash(self, worker: str) -> None:
        """A new process takes its place; the leases of the old one run out."""
        self.num_crashes += 1
        del self.boards[worker], self.suspects[worker]
        self.driver.lapse(worker)
        self.driver.reap()
        self.add_worker()

    def add_worker(self) -> None:
        name = f"w{len(self.driver.numbers)}"
        self.boards[name], self.suspects[name] = {}, set()
        self.driver.numbers.setdefault(name, -1)

    def compute(self, worker: str) -> None:
        for job_id, riding in list(self.boards[worker].items()):
            riding[1] += 1
            assert self.driver.emit(worker, job_id, riding[0], riding[1], offset=0) == "ok"
            self.suspects[worker].discard(job_id)
            if self.chance.random() < 0.4:
                assert self.driver.finish(worker, job_id, riding[0], riding[1] + 1) == "ok"
                del self.boards[worker][job_id]

    def work(self, most_turns: int = 2_000) -> None:
        for _ in range(self.size):
            self.add_worker()
        for _ in range(most_turns):
            if "live" not in self.driver.names():
                return
            self.step(self.chance.choice(list(self.boards)))
        raise AssertionError("jobs were left over")


@pytest.mark.parametrize("num_poison", [1, 3])
def test_a_poisoned_job_among_two_hundred_good_ones(driver: Driver, num_poison: int) -> None:
    number = random.randrange(2**32)
    print(f"seed {number}")
    chance = random.Random(number)
    jobs = [job_number(index) for index in range(200 + num_poison)]
    poison = frozenset(chance.sample(jobs, num_poison))
    for job_id in jobs:
        driver.submit(job_id)
    crew = Crew(driver, poison, chance)
    crew.work()
    assert {job_id for job_id in jobs if driver.state(job_id) == "finished"} == set(jobs) - poison
    letters = driver.run(dead_list(driver.prefix))
    assert {fields["id"].decode() for _, fields in letters} == poison
    assert {fields["losses"] for _, fields in letters} == {b"3"}
    assert num_poison <= crew.num_crashes <= 3 * num_poison, "each boards three times at most"
    driver.assert_nothing_is_left()


def lose(driver: Driver, worker: str) -> None:
    driver.lapse(worker)
    assert driver.reap().moved > 0


def test_the_way_of_a_poisoned_job(driver: Driver) -> None:
    job_id = job_number(1)
    driver.submit(job_id)
    (first,) = driver.take("a")
    lose(driver, "a")
    assert driver.line("q:suspect") == [job_id]
    (second,) = driver.take("b")
    lose(driver, "b")
    assert driver.line("q:alone") == [job_id]
    (third,) = driver.take("c")
    assert [job.losses for job in (first, second, third)] == [1, 2, 3]
    assert [job.alone for job in (first, second, third)] == [False, False, True]
    driver.lapse("c")
    assert driver.reap().buried == 1
    ((name, letter),) = driver.run(dead_list(driver.prefix))
    assert letter["worker"] == b"c"
    assert letter["attempts"] == b"3"
    assert driver.run(dead_read(driver.prefix, name))["body"] == b"body"
    assert b"3 leases lost in a row" in letter["reason"]
    driver.assert_nothing_is_left()


def test_one_suspect_to_a_worker(driver: Driver) -> None:
    for index in range(6):
        driver.submit(job_number(index))
    assert len(driver.take("a")) == 6
    lose(driver, "a")
    driver.submit(job_number(9))
    taken = driver.take("b")
    assert [job.job_id for job in taken if job.losses > 1] == [job_number(0)]
    assert job_number(9) in [job.job_id for job in taken]
    assert driver.take("b", on_board=2, carries_suspect=True) == ()
    assert len(driver.take("c")) == 1


def test_a_token_clears_a_suspect(driver: Driver) -> None:
    driver.submit(job_number(1))
    driver.take("a")
    lose(driver, "a")
    (job,) = driver.take("b")
    assert driver.emit("b", job.job_id, 2, job.seq + 1) == "ok"
    lose(driver, "b")
    assert driver.line("q:resumed") == [job.job_id]
    (again,) = driver.take("c")
    assert again.losses == 1


def test_an_event_without_tokens_clears_nobody(driver: Driver) -> None:
    driver.submit(job_number(1))
    (job,) = driver.take("a")
    assert driver.emit("a", job.job_id, 1, job.seq + 1, count=0) == "ok"
    lose(driver, "a")
    assert driver.line("q:suspect") == [job.job_id]


class TestAlone:
    def wait_alone(self, driver: Driver, index: int = 1) -> str:
        job_id = job_number(index)
        driver.submit(job_id)
        for worker in ("a", "b"):
            assert job_id in [job.job_id for job in driver.take(worker)]
            lose(driver, worker)
        assert job_id in driver.line("q:alone")
        return job_id

    def test_a_worker_with_others_on_board_makes_room_first(self, driver: Driver) -> None:
        alone = self.wait_alone(driver)
        driver.submit(job_number(5))
        assert driver.take("w", on_board=3) == ()
        assert driver.take("w", on_board=1) == ()
        (job,) = driver.take("w", on_board=0)
        assert job.job_id == alone
        assert job.alone
        assert [job.job_id for job in driver.take("other")] == [job_number(5)]

    def test_only_one_worker_makes_room(self, driver: Driver) -> None:
        self.wait_alone(driver)
        driver.submit(job_number(5))
        assert driver.take("w", on_board=3) == ()
        assert [job.job_id for job in driver.take("other", on_board=3)] == [job_number(5)]

    def test_an_empty_worker_need_not_wait_for_the_one_that_makes_room(self, driver: Driver) -> None:
        alone = self.wait_alone(driver)
        assert driver.take("w", on_board=3) == ()
        assert [job.job_id for job in driver.take("empty")] == [alone]
        assert driver.redis.exists(f"{driver.prefix}:clearing") == 0

    def test_the_right_to_make_room_ends_with_its_holder(self, driver: Driver) -> None:
        self.wait_alone(driver)
        assert driver.take("w", on_board=3) == ()
        assert 0 < driver.redis.pttl(f"{driver.prefix}:clearing") <= 60_000

    def test_a_cancelled_one_holds_nobody_up(self, driver: Driver) -> None:

        alone = self.wait_alone(driver)
        assert driver.run(cancel(driver.prefix, alone)) == "ok"
        driver.submit(job_number(5))
        assert len(driver.take("w", on_board=3)) == 1


class TestHandedBack:
    def test_a_drain_spends_nothing(self, driver: Driver) -> None:
        """A shutdown counts no try."""
        driver.submit(job_number(1))
        for turn in range(10):
            (job,) = driver.take(f"w{turn}")
            assert (job.losses, job.failures, job.epoch) == (1, 0, turn + 1)
            call = hand_back(driver.prefix, f"w{turn}", [(job.job_id, job.epoch)], policy=POLICY)
            assert driver.run(call) == ("ok",)
            assert driver.line("q:resumed") == [job.job_id]

    def test_a_suspect_stays_one_through_a_drain(self, driver: Driver) -> None:
        driver.submit(job_number(1))
        driver.take("a")
        lose(driver, "a")
        (job,) = driver.take("b")
        assert driver.run(hand_back(driver.prefix, "b", [(job.job_id, 2)], policy=POLICY)) == ("ok",)
        assert driver.line("q:suspect") == [job.job_id]

    def test_a_batch_whose_engine_broke_down_goes_on_apart(self, driver: Driver) -> None:
        for index in range(3):
            driver.submit(job_number(index))
        jobs = driver.take("a")
        assert driver.emit("a", jobs[0].job_id, 1, 2) == "ok"
        pairs = [(job.job_id, job.epoch) for job in jobs]
        assert driver.run(hand_back(driver.prefix, "a", pairs, policy=POLICY, spent=True)) == ("ok",) * 3
        assert driver.line("q:suspect") == [job.job_id for job in jobs]

    def test_spent_three_times_without_a_token_is_the_end(self, driver: Driver) -> None:
        driver.submit(job_number(1))
        answers: list[str] = []
        for turn in range(3):
            (job,) = driver.take(f"w{turn}")
            pairs = [(job.job_id, job.epoch)]
            call = hand_back(driver.prefix, f"w{turn}", pairs, policy=POLICY, spent=True)
            (answer,) = driver.run(call)
            answers.append(answer)
        assert answers == ["ok", "ok", "dead"]
        assert driver.gauges() == {}


def test_failures_are_counted_apart_from_losses(driver: Driver) -> None:
    """What counts is kept with the job, not with the process that failed."""
    driver.submit(job_number(1))
    answers = []
    for turn in range(3):
        (job,) = driver.take(f"w{turn}")
        assert (job.failures, job.losses) == (turn, 1)
        policy = POLICY._replace(max_failures=3)
        call = fail(driver.prefix, f"w{turn}", job.job_id, job.epoch, reason="x", jitter=0, policy=policy)
        answers.append(driver.run(call))
        driver.make_due(job.job_id)
    assert answers == ["ok", "ok", "dead"]
    ((_, letter),) = driver.run(dead_list(driver.prefix))
    assert letter["failures"] == b"3"
    assert letter["reason"] == b"3 failed attempts, the last: x"
