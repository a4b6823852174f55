"""Delays, deadlines, queue lifetimes, and how long keys live."""

from __future__ import annotations

import pytest

from chairlift_client import keys
from chairlift_client.operations import SubmitReply, find, status
from chairlift_client.protocol import Failed
from chairlift_client.worker_operations import fail, hand_back, open_partition, tidy
from protocol_driver import POLICY, Driver, job_number

JOB = job_number(1)
HOUR_MS = 3_600_000
DAY_MS = 24 * HOUR_MS


def score(driver: Driver, name: str, job_id: str = JOB) -> float | None:
    value = driver.redis.zscore(f"{driver.prefix}:{name}", job_id)
    return None if value is None else float(value)


class TestDelay:
    def test_a_delayed_job_waits_for_its_time(self, driver: Driver) -> None:
        driver.submit(JOB, delay_ms=HOUR_MS)
        reply = driver.claim("w")
        assert reply.jobs == ()
        assert HOUR_MS - 10_000 < reply.next_due_ms <= HOUR_MS
        found = driver.run(status(driver.prefix, JOB))
        assert found is not None
        assert found.state == "delayed"
        assert found.due_ms - found.submitted_ms == HOUR_MS
        driver.make_due(JOB)
        (job,) = driver.take("w")
        assert job.epoch == 1
        driver.complete("w", job)
        driver.assert_nothing_is_left()

    def test_run_at_is_a_time_by_the_servers_clock(self, driver: Driver) -> None:
        now = driver.now_ms()
        driver.submit(JOB, run_at_ms=now + HOUR_MS)
        assert score(driver, "later") == now + HOUR_MS
        driver.submit(job_number(2), run_at_ms=now - HOUR_MS)
        assert [job.job_id for job in driver.take("w")] == [job_number(2)]

    def test_the_queue_lifetime_begins_when_the_delay_is_over(self, driver: Driver) -> None:
        now = driver.now_ms()
        driver.submit(JOB, run_at_ms=now + HOUR_MS, queue_ttl_ms=5_000)
        assert score(driver, "live") == now + HOUR_MS + 5_000

    def test_a_due_job_that_was_promoted_without_capacity_is_not_lost(self, driver: Driver) -> None:
        driver.submit(JOB, delay_ms=HOUR_MS)
        driver.make_due(JOB)
        assert driver.claim("w", 0).jobs == ()
        assert driver.state(JOB) == "waiting"
        assert len(driver.take("w")) == 1

    def test_more_due_jobs_than_one_call_promotes(self, driver: Driver) -> None:
        for index in range(300):
            driver.submit(job_number(index), delay_ms=HOUR_MS)
            driver.make_due(job_number(index))
        reply = driver.claim("w", 500)
        assert len(reply.jobs) == 256
        assert reply.next_due_ms == 0
        assert len(driver.take("w", 500)) == 44

    def test_a_failed_attempt_backs_off_twice_as_long_each_time(self, driver: Driver) -> None:
        policy = POLICY._replace(max_failures=9, first_backoff_ms=1_000, max_backoff_ms=5_000)
        driver.submit(JOB)
        for failures, backoff in enumerate((1_000, 2_000, 4_000, 5_000, 5_000), start=1):
            (job,) = driver.take("w")
            assert job.failures == failures - 1
            before = driver.now_ms()
            call = fail(driver.prefix, "w", JOB, job.epoch, reason="x", jitter=1.0, policy=policy)
            assert driver.run(call) == "ok"
            due = score(driver, "later")
            assert due is not None
            assert before + backoff <= due <= driver.now_ms() + backoff
            driver.make_due(JOB)

    def test_jitter_halves_a_backoff_at_most(self, driver: Driver) -> None:
        driver.submit(JOB)
        driver.take("w")
        policy = POLICY._replace(first_backoff_ms=10_000)
        before = driver.now_ms()
        driver.run(fail(driver.prefix, "w", JOB, 1, reason="x", jitter=0.0, policy=policy))
        due = score(driver, "later")
        assert due is not None
        assert before + 5_000 <= due <= driver.now_ms() + 5_000


class TestDeadline:
    @pytest.mark.parametrize("is_delayed", [False, True])
    def test_a_deadline_passes_before_boarding(self, driver: Driver, is_delayed: bool) -> None:
        driver.submit(JOB, deadline_ms=HOUR_MS, delay_ms=2 * HOUR_MS if is_delayed else 0)
        assert driver.claim("w", 0).next_due_ms <= HOUR_MS
        driver.make_overdue(JOB, deadline=True)
        assert driver.take("w") == ()
        event = driver.log(JOB)[-1]
        assert isinstance(event, Failed)
        assert event.code == "deadline"
        driver.assert_nothing_is_left()

    def test_a_running_job_is_its_workers_affair(self, driver: Driver) -> None:
        driver.submit(JOB, deadline_ms=HOUR_MS)
        (job,) = driver.take("w")
        assert job.deadline_ms - job.submitted_ms == HOUR_MS
        driver.make_overdue(JOB, deadline=True)
        reply = driver.claim("other")
        assert reply.next_due_ms > 0
        assert driver.state(JOB) == "running"

    def test_a_job_handed_back_after_its_deadline_is_not_boarded_again(self, driver: Driver) -> None:
        driver.submit(JOB, deadline_ms=HOUR_MS)
        driver.take("w")
        driver.make_overdue(JOB, deadline=True)
        assert driver.run(hand_back(driver.prefix, "w", [(JOB, 1)], policy=POLICY)) == ("ok",)
        assert driver.take("other") == ()
        assert driver.state(JOB) == "failed"
        driver.assert_nothing_is_left()


class TestQueueLifetime:
    def test_a_job_that_nobody_takes_fails(self, driver: Driver) -> None:
        driver.submit(JOB, queue_ttl_ms=HOUR_MS)
        driver.make_overdue(JOB)
        assert driver.take("w") == ()
        event = driver.log(JOB)[-1]
        assert isinstance(event, Failed)
        assert event.code == "queue_timeout"
        assert str(HOUR_MS) in event.message
        driver.assert_nothing_is_left()

    def test_a_queue_without_workers_does_not_stay_full(self, driver: Driver) -> None:
        call = open_partition(
            driver.prefix, context_tokens=0, pool_tokens=0, max_waiting=5, max_bytes=0, max_tenant_jobs=0
        )
        driver.run(call)
        for index in range(5):
            driver.submit(job_number(index))
        assert driver.submit(job_number(5)).kind == "full"
        for index in range(5):
            driver.make_overdue(job_number(index))
        assert driver.submit(job_number(6)).kind == "ok"
        assert driver.state(job_number(0)) == "failed"
        assert driver.gauges()["waiting"] == 1

    def test_it_holds_for_a_job_that_waits_to_be_resumed(self, driver: Driver) -> None:
        driver.submit(JOB, queue_ttl_ms=HOUR_MS)
        driver.take("w")
        assert driver.run(hand_back(driver.prefix, "w", [(JOB, 1)], policy=POLICY)) == ("ok",)
        at = score(driver, "live")
        assert at is not None
        assert driver.now_ms() < at <= driver.now_ms() + HOUR_MS

    def test_it_holds_for_a_job_that_waits_for_its_next_try(self, driver: Driver) -> None:
        driver.submit(JOB, queue_ttl_ms=HOUR_MS)
        driver.take("w")
        driver.run(fail(driver.prefix, "w", JOB, 1, reason="x", jitter=1, policy=POLICY))
        due, at = score(driver, "later"), score(driver, "live")
        assert due is not None
        assert at == due + HOUR_MS

    def test_keys_that_ran_out_before_anybody_looked_leave_no_gauge_behind(self, driver: Driver) -> None:
        """Neither a worker nor a producer came by for more than a day after the job's queue lifetime."""

        driver.submit(JOB)
        driver.submit(job_number(2), delay_ms=HOUR_MS)
        driver.make_overdue(JOB)
        driver.make_overdue(job_number(2))
        driver.make_due(job_number(2))
        driver.redis.delete(keys.job(driver.prefix, JOB), keys.job(driver.prefix, job_number(2)))
        assert driver.take("w") == ()
        driver.run(tidy(driver.prefix, lease_ms=1000, dead_ttl_ms=1000))
        driver.assert_nothing_is_left()

    def test_a_running_job_whose_hash_ran_out_leaves_no_place_behind(self, driver: Driver) -> None:
        driver.submit(JOB)
        driver.take("w")
        driver.redis.delete(keys.job(driver.prefix, JOB))
        driver.lapse()
        driver.reap()
        assert driver.streams() == []
        assert "running" not in driver.gauges()


class TestHowLongKeysLive:
    def test_a_job_outlives_its_ttls_while_it_runs(self, driver: Driver) -> None:
        """Queue and result ttl of a second each, and a lease of a minute."""
        driver.submit(JOB, queue_ttl_ms=1_000, result_ttl_ms=1_000, idempotency="key", body_hash="h")
        driver.take("w")
        for name in (f"job:{JOB}", f"ev:{JOB}", "idem:key", "live", "held", "n", "q:normal:t"):
            assert driver.redis.pttl(f"{driver.prefix}:{name}") > HOUR_MS, name

    def test_a_renewal_keeps_every_key_of_the_job_the_idempotency_key_too(self, driver: Driver) -> None:
        driver.submit(JOB, queue_ttl_ms=HOUR_MS, idempotency="key", body_hash="h")
        driver.take("w")
        names = [f"job:{JOB}", f"ev:{JOB}", "idem:key", "live", "held", "n", "q:normal:t", "jobs"]
        for name in names:
            driver.redis.pexpire(f"{driver.prefix}:{name}", 100_000)
        driver.renew("w", (JOB, 1))
        for name in names:
            assert driver.redis.pttl(f"{driver.prefix}:{name}") > HOUR_MS, name

    def test_after_the_end_all_of_it_lives_as_long_as_the_result(self, driver: Driver) -> None:
        driver.submit(JOB, result_ttl_ms=HOUR_MS, idempotency="key", body_hash="h")
        (job,) = driver.take("w")
        driver.complete("w", job)
        for name in (f"job:{JOB}", f"ev:{JOB}", "idem:key"):
            assert HOUR_MS - 10_000 < driver.redis.pttl(f"{driver.prefix}:{name}") <= HOUR_MS, name
        assert "body" not in driver.job(JOB)

    def test_a_long_delay_keeps_every_key(self, driver: Driver) -> None:
        driver.submit(JOB, delay_ms=30 * DAY_MS, idempotency="key", body_hash="h")
        for name in (f"job:{JOB}", "idem:key", "live", "later", "n", "jobs"):
            assert driver.redis.pttl(f"{driver.prefix}:{name}") > 31 * DAY_MS, name
        driver.submit(job_number(2))
        (job,) = driver.take("w")
        driver.complete("w", job)
        for name in ("live", "later", "n", "jobs"):
            assert driver.redis.pttl(f"{driver.prefix}:{name}") > 31 * DAY_MS, name


class TestIdempotency:
    def submit(self, driver: Driver, index: int, body_hash: str = "h") -> tuple[str, str]:
        reply = driver.submit(job_number(index), idempotency="key", body_hash=body_hash)
        return reply.kind, reply.job_id

    def test_one_job_during_and_after_another_body_is_a_conflict_and_then_it_is_free(
        self, driver: Driver
    ) -> None:
        assert self.submit(driver, 1) == ("ok", JOB)
        assert self.submit(driver, 2) == ("dup", JOB)
        assert self.submit(driver, 3, "other") == ("conflict", JOB)
        (job,) = driver.take("w")
        assert self.submit(driver, 2) == ("dup", JOB)
        driver.complete("w", job)
        assert self.submit(driver, 2) == ("dup", JOB)
        assert self.submit(driver, 3, "other") == ("conflict", JOB)
        assert driver.take("w") == ()
        driver.redis.delete(*(f"{driver.prefix}:{name}" for name in (f"job:{JOB}", f"ev:{JOB}", "idem:key")))
        assert self.submit(driver, 3, "other") == ("ok", job_number(3))

    def test_a_repeat_of_the_submission_itself_needs_no_key(self, driver: Driver) -> None:
        assert driver.submit(JOB).kind == "ok"
        before = driver.snapshot()
        assert driver.submit(JOB) == SubmitReply("dup", JOB)
        assert driver.snapshot() == before

    def test_a_repeat_is_known_even_where_the_queue_is_full(self, driver: Driver) -> None:
        call = open_partition(
            driver.prefix, context_tokens=0, pool_tokens=0, max_waiting=1, max_bytes=0, max_tenant_jobs=0
        )
        driver.run(call)
        assert self.submit(driver, 1) == ("ok", JOB)
        assert driver.submit(job_number(9)).kind == "full"
        assert self.submit(driver, 2) == ("dup", JOB)

    def test_find_reads_only(self, driver: Driver) -> None:
        self.submit(driver, 1)
        before = driver.snapshot()
        found = [driver.run(find(driver.prefix, "key", body_hash)) for body_hash in ("h", "other")]
        assert [(reply.kind, reply.job_id) for reply in found if reply] == [("dup", JOB), ("conflict", JOB)]
        assert driver.run(find(driver.prefix, "nobody", "h")) is None
        assert driver.snapshot() == before
