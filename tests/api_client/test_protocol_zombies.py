"""Workers that were stopped between two operations and wake up after somebody else has taken over.

Whatever a zombie says is refused and changes nothing; whatever it said before counts.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from chairlift_client.operations import cancel
from chairlift_client.protocol import Finished, Resumed, Started, Tokens, encode
from chairlift_client.worker_operations import ClaimedJob, Emission, emit, fail, finish, hand_back
from protocol_driver import LEASE_MS, POLICY, Driver, assert_log_is_whole, job_number

JOB = job_number(1)


def claimed_by_zombie(driver: Driver) -> ClaimedJob:
    driver.submit(JOB)
    (job,) = driver.take("zombie")
    return job


def take_over(driver: Driver) -> ClaimedJob:
    """The zombie's lease is lost and another worker has the job."""
    driver.lapse("zombie")
    assert driver.reap().moved == 1
    (job,) = driver.take("heir")
    return job


def say_renew(driver: Driver) -> str:
    return "lost" if JOB in driver.renew("zombie", (JOB, 1)).lost else "ok"


def say_emit(driver: Driver) -> str:
    return driver.emit("zombie", JOB, 1, 2)


def say_finish(driver: Driver) -> str:
    return driver.finish("zombie", JOB, 1, 2)


def say_fail(driver: Driver) -> str:
    return driver.run(fail(driver.prefix, "zombie", JOB, 1, reason="late", jitter=0.5, policy=POLICY))


def say_hand_back(driver: Driver) -> str:
    return driver.run(hand_back(driver.prefix, "zombie", [(JOB, 1)], policy=POLICY))[0]


def say_hand_back_spent(driver: Driver) -> str:
    return driver.run(hand_back(driver.prefix, "zombie", [(JOB, 1)], policy=POLICY, spent=True))[0]


SAYINGS = (say_renew, say_emit, say_finish, say_fail, say_hand_back, say_hand_back_spent)


@pytest.mark.parametrize("say", SAYINGS)
@pytest.mark.parametrize("when", ["reaped", "taken over", "under way", "over", "forgotten"])
def test_what_a_zombie_says_is_refused_and_changes_nothing(
    driver: Driver, say: Callable[[Driver], str], when: str
) -> None:
    claimed_by_zombie(driver)
    if when == "reaped":
        driver.lapse("zombie")
        assert driver.reap().moved == 1
    else:
        heir = take_over(driver)
        assert heir.epoch == 2
        if when != "taken over":
            assert driver.emit("heir", JOB, 2, heir.seq + 1, count=3) == "ok"
        if when in ("over", "forgotten"):
            assert driver.finish("heir", JOB, 2, heir.seq + 2) == "ok"
        if when == "forgotten":
            driver.redis.delete(*(f"{driver.prefix}:{name}" for name in driver.names() if JOB in name))
    before = driver.snapshot()
    assert say(driver) == "lost"
    assert say(driver) == "lost"
    assert driver.snapshot() == before


@pytest.mark.parametrize("num_emitted", [0, 1, 4])
def test_stopped_after_any_number_of_tokens_and_resumed_from_the_last_logged_one(
    driver: Driver, num_emitted: int
) -> None:
    job = claimed_by_zombie(driver)
    for index in range(num_emitted):
        assert driver.emit("zombie", JOB, 1, job.seq + 1 + index, offset=index) == "ok"
    heir = take_over(driver)
    assert heir.seq == len(heir.log) == num_emitted + 2
    assert heir.losses == (1 if num_emitted else 2)
    assert driver.emit("zombie", JOB, 1, job.seq + 1 + num_emitted, offset=num_emitted) == "lost"
    driver.complete("heir", heir)
    events = driver.log(JOB)
    assert [type(event) for event in events] == [Started, *[Tokens] * num_emitted, Resumed, Tokens, Finished]
    assert_log_is_whole(events)
    driver.assert_nothing_is_left()


@pytest.mark.parametrize("how", ["finish", "fail", "hand_back"])
def test_an_end_that_was_executed_but_not_answered_is_a_repeat(driver: Driver, how: str) -> None:
    job = claimed_by_zombie(driver)
    assert driver.emit("zombie", JOB, 1, job.seq + 1) == "ok"
    sayings: dict[str, Callable[[], str]] = {
        "finish": lambda: driver.finish("zombie", JOB, 1, 3),
        "fail": lambda: say_fail(driver),
        "hand_back": lambda: say_hand_back(driver),
    }
    say = sayings[how]
    assert say() == "ok"
    before = driver.snapshot()
    assert say() == "dup"
    assert driver.snapshot() == before


def test_the_same_owner_name_with_an_old_epoch_is_a_stranger(driver: Driver) -> None:
    claimed_by_zombie(driver)
    driver.lapse("zombie")
    assert driver.reap().moved == 1
    (again,) = driver.take("zombie")
    assert again.epoch == 2
    before = driver.snapshot()
    assert [say(driver) for say in SAYINGS] == ["lost"] * len(SAYINGS)
    assert driver.snapshot() == before
    assert driver.renew("zombie", (JOB, 2)).lost == ()


def test_one_pipeline_of_a_zombie_with_good_and_lost_jobs(driver: Driver) -> None:
    other = job_number(2)
    claimed_by_zombie(driver)
    driver.submit(other)
    driver.take("zombie")
    driver.lapse("zombie")
    assert driver.renew("zombie", (other, 1)).lost == ()
    assert driver.reap().moved == 1
    events = [Emission(job_id, 1, 2, 0, encode(Tokens(2, 1, 0))) for job_id in (JOB, other)]
    assert driver.run(emit(driver.prefix, "zombie", events)) == ("lost", "ok")
    assert driver.renew("zombie", (JOB, 1), (other, 1)).lost == (JOB,)


def test_a_gap_in_the_events_is_refused(driver: Driver) -> None:
    job = claimed_by_zombie(driver)
    before = driver.snapshot()
    assert driver.emit("zombie", JOB, 1, job.seq + 2) == "gap"
    call = finish(
        driver.prefix, "zombie", JOB, 1, seq=job.seq + 2, state="finished", event=b"", result=b"", tokens=0
    )
    assert driver.run(call) == "gap"
    assert driver.snapshot() == before


def test_a_renewed_lease_is_never_reaped_however_long_the_job_runs(driver: Driver) -> None:
    """A job that is alive is not delivered again after a fixed time."""
    claimed_by_zombie(driver)
    for _ in range(20):
        driver.lapse("zombie")
        assert driver.renew("zombie", (JOB, 1)).lost == ()
        assert driver.reap().moved == 0
        assert driver.take("heir") == ()
    counts = driver.redis.xpending_range(f"{driver.prefix}:q:normal:t", "workers", "-", "+", 10)
    assert [row["times_delivered"] for row in counts] == [1]


class TestClaim:
    """Claims whose answers were lost, and claims that come after their time."""

    def test_a_lost_answer_is_given_again(self, driver: Driver) -> None:
        for index in range(5):
            driver.submit(job_number(index))
        first = driver.run(driver.claim_call("w", 0, 3))
        before = driver.snapshot()
        again = driver.run(driver.claim_call("w", 0, 1))
        assert again.jobs == first.jobs
        assert len(again.jobs) == 3
        assert driver.snapshot() == before
        assert len(driver.run(driver.claim_call("w", 1, 3)).jobs) == 2

    def test_a_lost_answer_names_no_job_that_was_lost_meanwhile(self, driver: Driver) -> None:
        driver.submit(JOB)
        assert len(driver.run(driver.claim_call("w", 0, 3)).jobs) == 1
        driver.lapse("w")
        assert driver.reap().moved == 1
        assert len(driver.take("heir")) == 1
        assert driver.run(driver.claim_call("w", 0, 3)).jobs == ()

    def test_a_lost_answer_tells_its_cancels_again(self, driver: Driver) -> None:
        claimed_by_zombie(driver)
        assert driver.run(cancel(driver.prefix, JOB)) == "asked"
        number = driver.numbers["zombie"] + 1
        for _ in range(2):
            assert driver.run(driver.claim_call("zombie", number, 0)).cancels == ((JOB, 1),)
        assert driver.run(driver.claim_call("zombie", number + 1, 0)).cancels == ()

    def test_a_claim_from_a_broken_connection_that_comes_late_takes_nothing(self, driver: Driver) -> None:
        """Nobody would hear its answer, and its jobs would stand still until their leases lapse."""
        assert driver.run(driver.claim_call("w", 0, 3)).jobs == ()
        assert driver.run(driver.claim_call("w", 1, 3)).jobs == ()
        driver.submit(JOB)
        before = driver.snapshot()
        assert driver.run(driver.claim_call("w", 0, 3)).jobs == ()
        assert driver.snapshot() == before
        assert len(driver.run(driver.claim_call("w", 2, 3)).jobs) == 1


class TestOutage:
    """The server was away: no worker could renew, and none is dead."""

    def test_no_storm_after_an_outage(self, driver: Driver) -> None:
        jobs = [job_number(index) for index in range(50)]
        for job_id in jobs:
            driver.submit(job_id)
        assert len(driver.take("w", 50)) == 50
        driver.lapse()
        driver.go_silent()
        assert driver.reap().quiet
        assert driver.reap().quiet
        assert 0 < driver.redis.pttl(f"{driver.prefix}:quiet") <= LEASE_MS
        assert driver.renew("w", *((job_id, 1) for job_id in jobs)).lost == ()
        driver.end_quiet()
        assert driver.reap() == (False, 0, 0, 0, 0)

    def test_the_dead_are_found_after_the_quiet_lease(self, driver: Driver) -> None:
        claimed_by_zombie(driver)
        driver.lapse()
        driver.go_silent()
        assert driver.renew("other").lost == ()
        assert driver.reap().quiet
        driver.end_quiet()
        assert driver.reap().moved == 1

    def test_whoever_speaks_first_begins_the_quiet(self, driver: Driver) -> None:
        claimed_by_zombie(driver)
        driver.lapse()
        driver.go_silent()
        driver.claim("other", 0)
        assert driver.reap().quiet
