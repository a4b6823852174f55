"""Cancel and forget, in every state that a job can be in."""

from __future__ import annotations

import pytest

from chairlift_client.calls import Call
from chairlift_client.operations import cancel, dead_list, find, forget
from chairlift_client.protocol import Cancelled, encode
from chairlift_client.worker_operations import FailAnswer, fail, finish, hand_back
from protocol_driver import POLICY, Driver, job_number

JOB = job_number(1)
STATES = ("waiting", "delayed", "running", "resumed", "suspect", "retried", "finished", "dead")


def bring_to(driver: Driver, state: str) -> None:
    """A job in this state; its last owner is `w` with epoch 1."""
    delay_ms = 3_600_000 if state == "delayed" else 0
    driver.submit(JOB, b"secret", delay_ms=delay_ms, idempotency="key", body_hash="h")
    if state in ("waiting", "delayed"):
        return
    (job,) = driver.take("w")
    if state == "resumed":
        assert driver.emit("w", JOB, 1, 2) == "ok"
    if state in ("resumed", "suspect"):
        driver.lapse()
        assert driver.reap().moved == 1
    if state == "retried":
        assert driver.run(fail_call(driver)) == "ok"
    if state == "finished":
        driver.complete("w", job)
    if state == "dead":
        call = fail(driver.prefix, "w", JOB, 1, reason="x", jitter=0, policy=POLICY._replace(max_failures=1))
        assert driver.run(call) == "dead"


def fail_call(driver: Driver) -> Call[FailAnswer]:
    return fail(driver.prefix, "w", JOB, 1, reason="x", jitter=0.5, policy=POLICY)


def say_cancelled(driver: Driver, worker: str, epoch: int, seq: int) -> str:
    call = finish(
        driver.prefix, worker, JOB, epoch, seq=seq, state="cancelled", event=encode(Cancelled(seq, epoch, 0)),
        result=b"", tokens=0,
    )  # fmt: skip
    return driver.run(call)


@pytest.mark.parametrize("state", ["waiting", "delayed", "resumed", "suspect", "retried"])
def test_a_job_that_does_not_run_ends_at_once(driver: Driver, state: str) -> None:
    bring_to(driver, state)
    assert driver.run(cancel(driver.prefix, JOB)) == "ok"
    assert driver.run(cancel(driver.prefix, JOB)) == "ended"
    assert isinstance(driver.log(JOB)[-1], Cancelled)
    assert driver.take("other") == ()
    driver.assert_nothing_is_left()


@pytest.mark.parametrize("state", ["finished", "dead"])
def test_a_job_that_has_ended_stays_as_it_is(driver: Driver, state: str) -> None:
    bring_to(driver, state)
    before = driver.snapshot()
    assert driver.run(cancel(driver.prefix, JOB)) == "ended"
    assert driver.snapshot() == before


def test_an_unknown_job_is_harmless(driver: Driver) -> None:
    assert driver.run(cancel(driver.prefix, JOB)) == "absent"
    assert driver.run(forget(driver.prefix, JOB)) == "absent"
    assert driver.names() == []


def test_a_running_job_is_cancelled_by_its_worker(driver: Driver) -> None:
    bring_to(driver, "running")
    assert [driver.run(cancel(driver.prefix, JOB)) for _ in range(3)] == ["asked"] * 3
    assert driver.claim("w", 0).cancels == ((JOB, 1),)
    assert driver.claim("w", 0).cancels == ()
    assert driver.renew("w", (JOB, 1)).cancelled == ((JOB, 1),)
    assert say_cancelled(driver, "w", 1, 2) == "ok"
    assert driver.state(JOB) == "cancelled"
    driver.assert_nothing_is_left()


def test_a_worker_that_finished_first_wins(driver: Driver) -> None:
    bring_to(driver, "running")
    assert driver.run(cancel(driver.prefix, JOB)) == "asked"
    assert driver.finish("w", JOB, 1, 2) == "ok"
    assert say_cancelled(driver, "w", 1, 2) == "dup"
    assert driver.state(JOB) == "finished"


@pytest.mark.parametrize("how", ["reap", "hand_back", "spent", "fail"])
def test_a_cancelled_job_that_its_worker_lets_go_is_not_run_again(driver: Driver, how: str) -> None:
    bring_to(driver, "running")
    assert driver.run(cancel(driver.prefix, JOB)) == "asked"
    if how == "reap":
        driver.lapse()
        assert driver.reap().cancelled == 1
    elif how == "fail":
        assert driver.run(fail_call(driver)) == "cancelled"
        assert driver.run(fail_call(driver)) == "dup"
    else:
        call = hand_back(driver.prefix, "w", [(JOB, 1)], policy=POLICY, spent=how == "spent")
        assert driver.run(call) == ("cancelled",)
        assert driver.run(call) == ("dup",)
    assert isinstance(driver.log(JOB)[-1], Cancelled)
    driver.redis.delete(f"{driver.prefix}:cancel:w")
    driver.assert_nothing_is_left()


def test_a_cancel_of_an_earlier_attempt_is_not_told_to_a_later_owner(driver: Driver) -> None:
    bring_to(driver, "running")
    assert driver.run(hand_back(driver.prefix, "w", [(JOB, 1)], policy=POLICY)) == ("ok",)
    (job,) = driver.take("heir")
    assert driver.run(cancel(driver.prefix, JOB)) == "asked"
    assert driver.claim("w", 0).cancels == ()
    assert driver.claim("heir", 0).cancels == ((JOB, job.epoch),)


@pytest.mark.parametrize("state", STATES)
def test_forget_leaves_no_trace_in_any_state(driver: Driver, state: str) -> None:
    bring_to(driver, state)
    answer = driver.run(forget(driver.prefix, JOB))
    if state == "running":
        assert answer == "asked"
        assert driver.claim("w", 0).cancels == ((JOB, 1),)
        assert say_cancelled(driver, "w", 1, 2) == "ok"
    else:
        assert answer == "ok"
    assert driver.run(forget(driver.prefix, JOB)) == "absent"
    assert driver.run(dead_list(driver.prefix)) == ()
    assert driver.run(find(driver.prefix, "key", "h")) is None
    driver.redis.delete(f"{driver.prefix}:claims:w")
    everything = repr(driver.snapshot())
    assert "secret" not in everything
    assert JOB not in everything
    driver.assert_nothing_is_left()


def test_a_forgotten_running_job_that_finishes_leaves_no_trace(driver: Driver) -> None:
    bring_to(driver, "running")
    assert driver.run(forget(driver.prefix, JOB)) == "asked"
    assert driver.finish("w", JOB, 1, 2) == "ok"
    assert driver.state(JOB) is None
    assert driver.finish("w", JOB, 1, 2) == "lost"


def test_a_forgotten_running_job_whose_worker_dies_leaves_no_trace(driver: Driver) -> None:
    bring_to(driver, "running")
    assert driver.run(forget(driver.prefix, JOB)) == "asked"
    driver.lapse()
    assert driver.reap().cancelled == 1
    assert driver.state(JOB) is None
    driver.assert_nothing_is_left()


def test_forgetting_a_retried_job_keeps_the_key_of_its_successor(driver: Driver) -> None:
    """The key ran out, another job stands under it: that one is not ours to take away."""
    bring_to(driver, "finished")
    driver.redis.delete(f"{driver.prefix}:idem:key")
    driver.submit(job_number(2), idempotency="key", body_hash="h")
    assert driver.run(forget(driver.prefix, JOB)) == "ok"
    found = driver.run(find(driver.prefix, "key", "h"))
    assert found is not None
    assert found.job_id == job_number(2)
